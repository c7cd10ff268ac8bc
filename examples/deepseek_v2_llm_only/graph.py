"""One role: a question in, pieces of text out. Params are fields of `omni_flow.compute.sampling.Sampling`."""

import os

from omni_flow.control.graph import Graph
from omni_flow.control.slots import stream
from omni_flow.control.types import Text
from omni_flow.models.deepseek_v2.role import DeepseekV2


def build(model: str) -> Graph:
    """The graph for the checkpoint in the folder `model`."""
    graph = Graph("deepseek_v2_llm_only")
    prompt = graph.placeholder("prompt", Text, required=True)
    graph.param("max_tokens", int, 128)
    graph.param("temperature", float, 0.0)
    llm = graph.role("llm", DeepseekV2, init={"model": model}, balance="session", stateful=True)
    answer = llm.interface("chat", inputs=[[{"question": prompt}]], outputs=[stream("token")])
    graph.output(text=answer.token)
    return graph


graph = build(os.environ.get("DEEPSEEK_V2", "DeepSeek-V2-Lite-Chat"))
