"""Which endpoints of OpenAI's API the graph serves, and how their fields map to its placeholders and params."""

from omni_flow.serve.endpoints import ChatCompletions

SAME = ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop")

endpoints = (
    ChatCompletions(
        messages="messages",
        fields={name: name for name in SAME},
        json_schema="json_schema",
        top_logprobs="logprobs",
        out_text="text",
        out_logprobs="logprobs",
        out_usage="usage",
        out_finish="finish",
    ),
)
