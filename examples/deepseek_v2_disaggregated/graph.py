"""Two roles over one KV pool. Params are fields of `omni_flow.compute.sampling.Sampling`."""

import os

from omni_flow.control.graph import Graph
from omni_flow.control.slots import stream
from omni_flow.control.types import Text

from .decode import Decode
from .prefill import Prefill


def build(model: str) -> Graph:
    """The graph for the checkpoint in the folder `model`."""
    graph = Graph("deepseek_v2_disaggregated")
    prompt = graph.placeholder("prompt", Text, required=True)
    graph.param("max_tokens", int, 128)
    graph.param("temperature", float, 0.0)
    prefill = graph.role("prefill", Prefill, init={"model": model})
    decode = graph.role("decode", Decode, init={"model": model})
    begun = prefill.interface("begin", inputs=[[{"question": prompt}]], outputs=["begun"])
    answer = decode.interface("go_on", inputs=[[begun.begun]], outputs=[stream("token", Text), "reused"])
    graph.output(text=answer.token, reused=answer.reused)
    return graph


graph = build(os.environ.get("DEEPSEEK_V2", "DeepSeek-V2-Lite-Chat"))
