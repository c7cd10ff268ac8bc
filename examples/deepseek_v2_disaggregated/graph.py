"""Two roles over one KV pool. Params are fields of `omni_flow.compute.sampling.Sampling`.

Those that look at the whole answer (penalties, grammars) are not among them: each role would see a part of it.
"""

import os
from typing import Any

from omni_flow.control.graph import Graph
from omni_flow.control.slots import stream
from omni_flow.control.types import Json, Text
from omni_flow.models.role_settings import role_settings

from .decode import Decode
from .prefill import Prefill


def build(model: str, **more: Any) -> Graph:
    """The graph for the checkpoint in the folder `model`. `more`: see `EngineRole`, the same for both roles."""
    graph = Graph("deepseek_v2_disaggregated")
    prompt = graph.placeholder("prompt", Text)
    messages = graph.placeholder("messages", Json)
    graph.param("max_tokens", int, 128)
    graph.param("temperature", float, 0.0)
    graph.param("top_p", float, 1.0)
    prefill = graph.role("prefill", Prefill, init={"model": model, **more})
    decode = graph.role("decode", Decode, init={"model": model, **more})
    begun = prefill.interface("begin", inputs=[[{"question": prompt}], [messages]], outputs=["begun"])
    answer = decode.interface(
        "go_on",
        inputs=[[begun.begun]],
        outputs=[stream("token", Text), "reused", {"usage": Json, "finish": Text}],
    )
    graph.output(text=answer.token, reused=answer.reused, usage=answer.usage, finish=answer.finish)
    return graph


graph = build(os.environ.get("DEEPSEEK_V2", "DeepSeek-V2-Lite-Chat"), **role_settings("DEEPSEEK_V2_ENGINE"))
