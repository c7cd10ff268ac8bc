"""What `rows.py` asks of engines and of models in PyTorch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
from compute_engines import ours


def write_deepseek(folder: Path, config: dict[str, Any]) -> None:
    """A random DeepSeek-V2 checkpoint in the official layout."""
    import torch
    from safetensors.torch import save_file

    from omni_flow.models.deepseek_v2.layout import DeepseekV2Config

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in DeepseekV2Config.read(config).tensors().items():
        drawn = torch.randn(*shape, generator=random)
        scale = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        tensors[name] = torch.ones(shape) if len(shape) == 1 else drawn * scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def row_errors(got: Any, wanted: Any) -> float:
    """Median over the rows of the relative error: a row whose experts are others in bf16 is off altogether."""
    off = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    return float(np.median(off))


def ids(seed: int, count: int, vocabulary: int) -> list[int]:
    """A random prompt."""
    drawn: list[int] = np.random.default_rng(seed).integers(2, vocabulary, count).tolist()
    return drawn


def with_weights(model: Any, dtype: Any) -> Any:
    """The model with its weights in `dtype`; its tables of positions stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


async def together(engine: Any, *steps: tuple[Any, Any, Any]) -> tuple[list[Any], int]:
    """Hidden states of steps (session, rows, causal) at once, and the forwards they took: the engine may look between
    their arrivals, so it is tried until they are one."""
    for _ in range(20):
        before = (await engine.stats())["row_forwards"]
        both = await asyncio.gather(*(session.step(rows, causal) for session, rows, causal in steps))
        forwards = (await engine.stats())["row_forwards"] - before
        if forwards == 1:
            break
    return both, forwards


async def logits(engine: Any, prompt: list[int]) -> Any:
    """Logits behind a prompt, (vocabulary,)."""
    from omni_flow.compute.engine import Request, TokenEvent, Tokens
    from omni_flow.compute.sampling import Sampling

    asked = Request(spans=[Tokens(prompt)], sampling=Sampling(max_tokens=1), logits=True)
    (event,) = [event async for event in engine.generate(asked) if isinstance(event, TokenEvent)]
    return event.logits


async def decode(engine: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of prompts that come at once."""
    return (await ours(engine, prompts, count))[1]
