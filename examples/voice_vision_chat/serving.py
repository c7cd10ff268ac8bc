"""Which endpoints of OpenAI's API the demo serves, and how their fields map to its placeholders and outputs."""

from omni_flow.serve.endpoints import ChatCompletions, Realtime, Transcriptions

endpoints = (
    ChatCompletions(text="text", image="picture", audio="speech", out_text="text", out_audio="speech"),
    Transcriptions(audio="speech", out_text="heard"),
    Realtime(audio="speech", text="text", image="picture", out_audio="speech", out_text="text", out_heard="heard"),
)
