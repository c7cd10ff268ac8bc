"""Fixed rows and step hooks in plain PyTorch, for the engine tests and `bench/gpu/rows.py`: models and references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import step_hooks
import torch

from omni_flow.compute.engine import Floats


def written(model: Any, folder: Path, scale: float = 0.15) -> Any:
    """The model with random weights, written to `folder`."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, scale)
    model.save_pretrained(folder)
    return model.eval()


def tiny_qwen(folder: Path, scale: float = 0.15, **more: Any) -> Any:
    """A Qwen3 with grouped heads, written to `folder`; the model itself is the oracle."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    }  # fmt: skip
    config = Qwen3Config(**sizes | more, tie_word_embeddings=False, attn_implementation="eager")
    return written(Qwen3ForCausalLM(config), folder, scale)


def bias(length: int, rows: int, causal: list[bool] | None, window: int = 0) -> torch.Tensor:
    """What the last `rows` rows see: what stands before them within the window, and each other unless causal."""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if window:
        mask.triu_(1 - window)
    for at in range(rows):
        if causal is None or not causal[at]:
            mask[length - rows + at, length - rows :] = True
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]


def states(
    model: Any, embeds: torch.Tensor, rows: int, causal: list[bool] | None = None, window: int | None = None
) -> Floats:
    """Hidden states of the last `rows` rows, float32.

    Args:
        window: tokens that every other layer sees; None: a model without windows.
    """

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(model.device, model.dtype)

    mask: Any = like(bias(len(embeds), rows, causal))
    if window is not None:
        mask = {"full_attention": mask, "sliding_attention": like(bias(len(embeds), rows, causal, window))}
    with torch.inference_mode():
        made = model.model(inputs_embeds=like(embeds)[None], attention_mask=mask, use_cache=False).last_hidden_state[0]
    found: Floats = made[len(embeds) - rows :].float().cpu().numpy()
    return found


def noise(seed: int, rows: int, hidden: int) -> Floats:
    """Rows of normal numbers."""
    made: npt.NDArray[np.float32] = np.random.default_rng(seed).standard_normal((rows, hidden)).astype(np.float32)
    return made


def step_inputs(model: Any, prompt: list[int], emitted: list[bytes | None], tokens: list[int]) -> torch.Tensor:
    """Everything that went in when `step_hooks.Codes` made these outputs: rows of the prompt, then of each step."""
    embed = model.model.embed_tokens.weight.detach()
    _, embeddings = step_hooks.heads(embed.shape[1])
    rows = [embed[prompt]]
    for token, codes in zip(tokens, emitted, strict=True):
        fed = None if codes is None else sum(embeddings[book][code] for book, code in enumerate(codes))
        rows.append((embed[token] if fed is None else fed.to(embed))[None])
    return torch.cat(rows)
