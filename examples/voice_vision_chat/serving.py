"""Which endpoints of OpenAI's API the demo serves, and how their fields map to its placeholders, params and outputs."""

from omni_flow.serve.endpoints import ChatCompletions, Realtime, Transcriptions

endpoints = (
    ChatCompletions(
        text="text",
        image="picture",
        audio="speech",
        fields={name: name for name in ("max_tokens", "temperature", "top_p", "stop")},
        top_logprobs="logprobs",
        out_text="text",
        out_audio="speech",
        out_logprobs="logprobs",
        out_usage="usage",
        out_finish="finish",
    ),
    Transcriptions(audio="speech", out_text="heard"),
    Realtime(audio="speech", text="text", image="picture", out_audio="speech", out_text="text", out_heard="heard"),
)
