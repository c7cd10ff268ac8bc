"""Small real graphs: an LLM that echoes, a voice that makes tones, a role that draws, an ear that counts samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pictures
from PIL import ImageDraw

from omni_flow import ABSENT, Audio, Context, Graph, Image, InvalidInput, Json, Text, collect, emit, optional, stream
from omni_flow.compute.errors import EngineDied, EngineFull, PromptTooLong

RATE = 24_000
Sound = Annotated[NDArray[np.float32], Audio(RATE)]
Heard = Annotated[NDArray[np.float32], Audio(16_000)]
Picture = Annotated[NDArray[np.uint8], Image()]


class Words:
    """Answers with the words of the question, one by one; says too what it saw and heard."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s

    async def say(
        self,
        ctx: Context,
        text: str | None = None,
        picture: Picture | None = None,
        sound: Heard | None = None,
    ) -> AsyncIterator[str]:
        words = (text or "").split(" ") if text else []
        if picture is not None:
            red, green, blue = (int(v) for v in picture.reshape(-1, 3).mean(axis=0))
            words.append(f"[picture {picture.shape[1]}x{picture.shape[0]} {red},{green},{blue}]")
        if sound is not None:
            words.append(f"[sound {len(sound)}]")
        for number, word in enumerate(words):
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            yield word if number == 0 else f" {word}"


class Voice:
    """A tone for each piece of text: 10 ms a letter, its pitch by the letter."""

    def speak(self, ctx: Context, piece: str) -> Iterator[Sound]:
        for letter in piece:
            t = np.arange(RATE // 100, dtype=np.float32) / RATE
            yield (0.3 * np.sin(2 * np.pi * (200 + ord(letter) % 64 * 10) * t)).astype(np.float32)


class Ear:
    """Says how many samples it heard."""

    def hear(self, sound: Heard) -> str:
        return f"{len(sound)} samples"

    def hear_all(self, sound: list[Heard]) -> str:
        return f"{sum(len(s) for s in sound)} samples in {len(sound)} pieces"


class Painter:
    """Draws what it is told: a ground whose colour is the word, and a frame; first roughly, then well."""

    def draw(self, prompt: str, width: int, height: int, picture: Picture | None = None) -> Iterator[Any]:
        words = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 80, 200)}
        colour = next((c for word, c in words.items() if word in prompt), (128, 128, 128))
        size = (width, height)
        if picture is not None:
            canvas = Pictures.fromarray(picture).resize(size)
        else:
            canvas = Pictures.new("RGB", size, colour)
        for step in range(2):
            rough = canvas.resize((max(1, width >> (3 - step)), max(1, height >> (3 - step))))
            yield emit(partial=np.asarray(rough.resize(size), np.uint8))
        pen = ImageDraw.Draw(canvas)
        pen.rectangle((0, 0, width - 1, height - 1), outline=(255, 255, 255), width=max(1, width // 32))
        pen.text((4, 4), prompt[:40], fill=(255, 255, 255))
        yield emit(picture=np.asarray(canvas, np.uint8))


class Cook:
    """Fails, waits, or answers, as it is told."""

    async def cook(self, ctx: Context, text: str) -> AsyncIterator[str]:
        if "crowd" in text:
            raise EngineFull("1024 requests wait, the limit", "try again")
        if "gas" in text:
            raise EngineDied("the engine process ended with status -9")
        if "long" in text:
            raise PromptTooLong("the prompt has 9 tokens; model and pool take 8", "shorten it")
        yield "begun"
        if "burn" in text:
            raise ValueError("the kitchen is on fire")
        if "smoke" in text:
            raise ValueError("smoke " * 1000 + "without fire")
        if "plastic" in text:
            raise InvalidInput("text", "nobody eats plastic")
        if "wait" in text:
            await asyncio.Event().wait()
        yield f" {ctx.params.heat}"


class Hose:
    """Frames of 10 kB without end."""

    async def run(self, text: str) -> AsyncIterator[str]:
        while True:
            yield text * 10_000


class Held:
    """Loads only while there is no file of that name."""

    def __init__(self, flag: str) -> None:
        self._flag = Path(flag)

    def setup(self) -> None:
        while self._flag.exists():
            time.sleep(0.01)

    async def run(self, text: str) -> str:
        return text


class Tools:
    """Calls the first tool it has, or answers with the conversation and its options as JSON."""

    def answer(self, ctx: Context, messages: Any, tools: Any = None, schema: Any = None) -> Any:
        if tools:
            call = {
                "id": "call_1",
                "type": "function",
                "function": {"name": tools[0]["function"]["name"], "arguments": "{}"},
            }
            return {"text": ABSENT, "calls": [call], "logprobs": [], "finish": "tool_calls"}
        text = f"{len(messages)} messages, schema {schema is not None}, heat {ctx.params.temperature}"
        if ctx.params.limit:
            text += f", limit {ctx.params.limit}, {len(ctx.params.stop)} stop text"
        entries = [{"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []}]
        return {"text": text, "calls": [], "logprobs": entries, "finish": "stop"}


class Forms:
    """Says what it was told of the answer's form, and counts."""

    def answer(self, ctx: Context, text: str) -> Any:
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 2}
        return {"text": f"{ctx.params.schema} {ctx.params.top}", "logprobs": [], "usage": usage}


def chat(pause_s: float = 0.0) -> Graph:
    """Text, a picture and a sound in; words and tones out."""
    graph = Graph("chat")
    text, picture = graph.placeholder("text", Text), graph.placeholder("picture", Image)
    sound = graph.placeholder("sound", Audio(16_000))
    llm = graph.role("llm", Words, init={"pause_s": pause_s})
    said = llm.interface(
        "say",
        inputs=[
            [text, optional(picture), optional(sound)],
            [{"sound": sound, "picture": optional(picture)}],
            [{"picture": picture}],
        ],
        outputs=[stream("word")],
    )
    tones = graph.role("voice", Voice).interface("speak", inputs=[[{"piece": said.word}]], outputs=[stream("tone")])
    graph.output(answer=said.word, speech=tones.tone)
    return graph


def echo(pause_s: float = 0.0) -> Graph:
    """Text in, its words out; nothing else."""
    graph = Graph("echo")
    text = graph.placeholder("text", Text, required=True)
    said = graph.role("llm", Words, init={"pause_s": pause_s}).interface(
        "say", inputs=[[text]], outputs=[stream("word")]
    )
    graph.output(answer=said.word)
    return graph


def voice() -> Graph:
    """Text in, tones out."""
    graph = Graph("voice")
    text = graph.placeholder("text", Text, required=True)
    tones = graph.role("voice", Voice).interface("speak", inputs=[[{"piece": text}]], outputs=[stream("tone")])
    graph.output(speech=tones.tone)
    return graph


def ear() -> Graph:
    """Sound in, text out."""
    graph = Graph("ear")
    sound = graph.placeholder("sound", Audio(16_000), required=True)
    graph.output(heard=graph.role("ear", Ear).interface("hear", inputs=[[sound]], outputs=["text"]).text)
    return graph


def microphone() -> Graph:
    """Sound piece by piece in; text out when it ends."""
    graph = Graph("microphone")
    sound = graph.placeholder("sound", Audio(16_000), stream=True)
    heard = graph.role("ear", Ear).interface("hear_all", inputs=[[{"sound": collect(sound)}]], outputs=["text"])
    words = graph.role("llm", Words).interface("say", inputs=[[{"text": heard.text}]], outputs=[stream("word")])
    tones = graph.role("voice", Voice).interface("speak", inputs=[[{"piece": words.word}]], outputs=[stream("tone")])
    graph.output(heard=heard.text, answer=words.word, speech=tones.tone)
    return graph


def listener(pause_s: float = 0.2) -> Graph:
    """Sound or text in; words out, slowly."""
    graph = Graph("listener")
    sound, text = graph.placeholder("sound", Audio(16_000)), graph.placeholder("text", Text)
    heard = graph.role("ear", Ear).interface("hear", inputs=[[sound]], outputs=["text"])
    said = graph.role("llm", Words, init={"pause_s": pause_s}).interface(
        "say", inputs=[[{"text": heard.text}], [text]], outputs=[stream("word")]
    )
    graph.output(answer=said.word)
    return graph


def flood() -> Graph:
    """A stream without end."""
    graph = Graph("flood")
    text = graph.placeholder("text", Text, required=True)
    run = graph.role("hose", Hose).interface("run", inputs=[[text]], outputs=[stream("water")])
    graph.output(water=run.water)
    return graph


def held(flag: str) -> Graph:
    """A role that is kept from coming up again by a file."""
    graph = Graph("held")
    text = graph.placeholder("text", Text, required=True)
    graph.output(
        same=graph.role("r", Held, init={"flag": flag}).interface("run", inputs=[[text]], outputs=["same"]).same
    )
    return graph


def painter() -> Graph:
    """A prompt in, a picture out, and two rough ones before."""
    graph = Graph("painter")
    prompt = graph.placeholder("prompt", Text, required=True)
    picture = graph.placeholder("picture", Image)
    width, height = graph.placeholder("width", int, required=True), graph.placeholder("height", int, required=True)
    drawn = graph.role("painter", Painter).interface(
        "draw",
        inputs=[[prompt, width, height, optional(picture)]],
        outputs=[{"picture": Image}, stream("partial", Image)],
    )
    graph.output(picture=drawn.picture, partial=drawn.partial)
    return graph


def kitchen() -> Graph:
    """Fails or waits when it is told to; has a param."""
    graph = Graph("kitchen")
    text = graph.placeholder("text", Text, required=True)
    graph.param("heat", float, 1.0)
    cooked = graph.role("cook", Cook).interface("cook", inputs=[[text]], outputs=[stream("dish")])
    graph.output(dish=cooked.dish)
    return graph


def tools() -> Graph:
    """The whole conversation and tools in; text, tool calls, logprobs and a finish reason out."""
    graph = Graph("tools")
    messages = graph.placeholder("messages", Json, required=True)
    offered, schema = graph.placeholder("tools", Json), graph.placeholder("schema", Json)
    graph.param("temperature", float, 1.0)
    graph.param("limit", int, 0)
    graph.param("stop", Json)
    made = graph.role("llm", Tools).interface(
        "answer",
        inputs=[[messages, {"tools": optional(offered)}, optional(schema)]],
        outputs=[{"text": Text, "calls": Json, "logprobs": Json, "finish": Text}],
    )
    graph.output(text=made.text, calls=made.calls, logprobs=made.logprobs, finish=made.finish)
    return graph


def forms() -> Graph:
    """Text in; the params that say what form the answer has, and a usage."""
    graph = Graph("forms")
    text = graph.placeholder("text", Text, required=True)
    graph.param("schema", Json)
    graph.param("top", Json)
    made = graph.role("llm", Forms).interface(
        "answer", inputs=[[text]], outputs=[{"text": Text, "logprobs": Json, "usage": Json}]
    )
    graph.output(text=made.text, logprobs=made.logprobs, usage=made.usage)
    return graph
