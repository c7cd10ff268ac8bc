"""A graph of one real engine, spoken to over HTTP: what the tests of its sessions share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_flow import Graph, Json, Text, stream
from omni_flow.models.deepseek_v2.role import DeepseekV2
from omni_flow.serve.endpoints import ChatCompletions
from omni_flow.serve.server import Serving
from omni_flow.testing import tiny_checkpoint

WAIT_S = 240.0
"""An engine takes a while to start where other tests run."""


def talk(folder: Path, *, engine: dict[str, Any] | None = None, retries: int = 0, **role: Any) -> Serving:
    """The model `talk`: a small DeepSeek-V2 that is made in `folder`, and says 8 tokens unless it is told how many.

    `engine`: fields of its `EngineConfig`. `retries`: of its interface. `role`: options of its role.
    """
    graph = Graph("talk")
    prompt = graph.placeholder("prompt", Text, required=True)
    graph.param("max_tokens", int, 8)
    init = {"model": str(tiny_checkpoint("deepseek_v2", folder)), "engine": engine, "sampling": {"ignore_eos": True}}
    said = graph.role("llm", DeepseekV2, init=init, **role).interface(
        "reply",
        inputs=[[{"question": prompt}]],
        outputs=[stream("token", Text), stream("logprobs", Json), {"usage": Json, "finish": Text}],
        retries=retries,
    )
    endpoint = ChatCompletions(text="prompt", out_text="text", out_usage="usage", fields={"max_tokens": "max_tokens"})
    graph.output(text=said.token, usage=said.usage)
    return Serving(graph, (endpoint,))
