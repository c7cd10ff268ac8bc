"""Helpers of the engine tests: golden files, the transformers oracle, and running a request to its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from omni_flow.compute.engine import EndEvent, Engine, Request, TokenEvent, Tokens
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang.kernel import SGLangEngine

GOLDENS = Path(__file__).parent.parent / "goldens"
T = TypeVar("T")
MODELS = ("deepseek_v2_lite", "deepseek_v2")


class Serving(NamedTuple):
    """An engine that all tests of a file ask, each from the same loop."""

    engine: SGLangEngine
    folder: Path
    loop: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)

    async def idle(self) -> dict[str, int]:
        """Counts once nothing runs any more: the engine answers between two steps."""
        while True:
            counts = dict(await self.engine.stats())
            if not counts["running"] and not counts["waiting"] and not counts["held"]:
                return counts


class Answer(NamedTuple):
    tokens: list[int]
    end: EndEvent
    events: list[TokenEvent]

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """(tokens, vocabulary), where asked for."""
        return np.stack([event.logits for event in self.events if event.logits is not None])


async def answer(engine: Engine, request: Request) -> Answer:
    """Run a request to its end."""
    events = [event async for event in engine.generate(request)]
    end = events.pop()
    assert isinstance(end, EndEvent)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert len(tokens) == len(events) == end.tokens
    return Answer([event.token for event in tokens], end, tokens)


def greedy(prompt: list[int], count: int, **more: Any) -> Request:
    """A request for `count` tokens, most likely ones, whatever the model's end token."""
    return Request(spans=[Tokens(prompt)], sampling=Sampling(max_tokens=count, ignore_eos=True), **more)


def golden(model: str) -> dict[str, npt.NDArray[Any]]:
    """The cases of a golden file."""
    from safetensors.numpy import load_file

    return dict(load_file(GOLDENS / f"{model}.cases.safetensors"))


def oracle(folder: Path) -> Any:
    """transformers' DeepSeek-V2 in float32.

    5.12.1 leaves YaRN's m² out of the softmax scale and misses an attribute that its group-limited router reads; both
    are put right here (and the result is held against the goldens, made with 5.24, which has both).
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    scaling = model.config.rope_scaling
    scale = model.model.layers[0].self_attn.scaling
    m = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
    if math.isclose(scale, (model.config.qk_nope_head_dim + model.config.qk_rope_head_dim) ** -0.5):
        for layer in model.model.layers:
            layer.self_attn.scaling *= m * m
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.num_experts = model.config.n_routed_experts
    return model.eval()


def oracle_greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Tokens and logits (count, vocabulary) of greedy decoding, whole prefixes each time, no cache."""
    import torch

    ids, rows = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            row = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            rows.append(row.numpy())
            ids.append(int(row.argmax()))
    return ids[len(prompt) :], np.stack(rows)
