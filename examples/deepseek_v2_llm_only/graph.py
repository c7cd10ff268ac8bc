"""One role: a question or a conversation in, pieces of text out.

Params are fields of `omni_flow.compute.sampling.Sampling`; one that is None leaves its field as it is there.
"""

import os
from typing import Any

from omni_flow.control.graph import Graph
from omni_flow.control.slots import stream
from omni_flow.control.types import Json, Text
from omni_flow.models.deepseek_v2.role import DeepseekV2
from omni_flow.models.role_settings import role_settings


def build(model: str, **more: Any) -> Graph:
    """The graph for the checkpoint in the folder `model`. `more`: see `EngineRole`."""
    graph = Graph("deepseek_v2_llm_only")
    prompt = graph.placeholder("prompt", Text)
    messages = graph.placeholder("messages", Json)
    graph.param("max_tokens", int, 128)
    graph.param("temperature", float, 0.0)
    graph.param("top_p", float, 1.0)
    graph.param("presence_penalty", float, 0.0)
    graph.param("frequency_penalty", float, 0.0)
    for name in ("stop", "logit_bias", "logprobs", "json_schema"):
        graph.param(name, Json)
    llm = graph.role("llm", DeepseekV2, init={"model": model, **more}, balance="session", stateful=True)
    answer = llm.interface(
        "reply",
        inputs=[[{"question": prompt}], [messages]],
        outputs=[stream("token", Text), stream("logprobs", Json), {"usage": Json, "finish": Text}],
    )
    graph.output(text=answer.token, logprobs=answer.logprobs, usage=answer.usage, finish=answer.finish)
    return graph


graph = build(os.environ.get("DEEPSEEK_V2", "DeepSeek-V2-Lite-Chat"), **role_settings("DEEPSEEK_V2_ENGINE"))
