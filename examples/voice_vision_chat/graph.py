"""The graph of the demo: speech, picture and text in; text and speech out.

The question comes from speech if there is any, else from text; what a picture shows is added if there is one. The
answer is spoken sentence by sentence while it is being written; of the two voices, each request gets one. Requests of
one session are turns of one conversation. Params are fields of `omni_flow.compute.sampling.Sampling`.
"""

from omni_flow import Audio, Graph, Image, Text, optional, stream, window
from omni_flow.control.types import Json

from .asr import Whisper
from .llm import SmolLM2
from .ocr import RapidOcr
from .sentences import Sentences
from .tts import Hibari

graph = Graph("voice_vision_chat")
speech = graph.placeholder("speech", Audio(16_000))
picture = graph.placeholder("picture", Image)
text = graph.placeholder("text", Text)

graph.param("max_tokens", int, 96)
graph.param("temperature", float, 0.0)
graph.param("top_p", float, 0.9)
graph.param("stop", Json)
graph.param("logprobs", Json)

asr = graph.role("asr", Whisper, init={"model": "tiny"})
ocr = graph.role("ocr", RapidOcr)
llm = graph.role("llm", SmolLM2, balance="session", stateful=True)
tts = graph.role("tts", Hibari, replicas=2)

heard = asr.interface("transcribe", inputs=[[speech]], outputs=["text"])
seen = ocr.interface("read", inputs=[[picture]], outputs=["text"])
answer = llm.interface(
    "chat",
    inputs=[
        [{"question": heard.text, "seen": optional(seen.text)}],
        [{"question": text, "seen": optional(seen.text)}],
    ],
    outputs=[stream("token", Text), stream("logprobs", Json), {"usage": Json, "finish": Text}],
)
spoken = tts.interface(
    "speak",
    inputs=[[{"sentence": window(answer.token, policy=Sentences(max_frames=64))}]],
    outputs=[stream("audio")],
    on_error="absent",
)
graph.output(
    text=answer.token,
    speech=spoken.audio,
    heard=heard.text,
    logprobs=answer.logprobs,
    usage=answer.usage,
    finish=answer.finish,
)
