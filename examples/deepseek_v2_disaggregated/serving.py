"""Which endpoints of OpenAI's API the graph serves, and how their fields map to its placeholders and params."""

from omni_flow.serve.endpoints import ChatCompletions

endpoints = (
    ChatCompletions(
        messages="messages",
        fields={name: name for name in ("max_tokens", "temperature", "top_p")},
        out_text="text",
        out_usage="usage",
        out_finish="finish",
    ),
)
