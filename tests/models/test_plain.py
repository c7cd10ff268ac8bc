"""Checkpoints of plain causal models: exactly the tensors that transformers writes are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from omni_flow.compute.checkpoint import check_tensors, read_config
from omni_flow.compute.errors import BadCheckpoint
from omni_flow.models.families import family_of


def written(folder: Path, kind: str, **more: Any) -> Path:
    """A tiny checkpoint of a kind, as transformers writes it."""
    given = {
        "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    } | more  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given)).save_pretrained(folder)
    return folder


def check(folder: Path) -> None:
    config = read_config(folder)
    family = family_of(config)
    assert family.tensors is not None
    check_tensors(folder, family.tensors(config), family.unread)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"head_dim": 8}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_what_transformers_writes_is_taken_and_anything_else_is_named(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    folder = written(tmp_path, kind, **more)
    check(folder)
    path = folder / "model.safetensors"
    whole = load_file(path)
    save_file(whole | {"lm_head.weight": np.zeros((60, 32), np.float32)}, path)
    check(folder)
    for name, tensor in whole.items():
        save_file({other: kept for other, kept in whole.items() if other != name}, path)
        with pytest.raises(BadCheckpoint, match=f"missing: {name}"):
            check(folder)
        save_file(whole | {name: np.concatenate((tensor, tensor))}, path)
        with pytest.raises(BadCheckpoint, match=f"misshaped: {name} is"):
            check(folder)
    save_file(whole | {"model.layers.9.mlp.up_proj.weight": tensor}, path)
    with pytest.raises(BadCheckpoint, match=r"unknown: model.layers.9.mlp.up_proj.weight"):
        check(folder)
