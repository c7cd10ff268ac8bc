"""Small random checkpoints in the official layouts, with working tokenizers: what runs them runs the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from omni_flow.models.deepseek_v2.layout import DeepseekV2Config
from omni_flow.models.deepseek_v2.template import TEMPLATE

_BEGIN: Final = "<｜begin▁of▁sentence｜>"
_END: Final = "<｜end▁of▁sentence｜>"


def _deepseek_v2(layout: str) -> dict[str, Any]:
    lite = layout == "lite"
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "kv_lora_rank": 32,
        "q_lora_rank": None if lite else 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "greedy" if lite else "group_limited_greedy",
        "n_group": 1 if lite else 4,
        "topk_group": 1 if lite else 2,
        "routed_scaling_factor": 1.0 if lite else 16.0,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 163840,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }


def _byte_tokenizer(folder: Path) -> None:
    """One token per byte of UTF-8, and the two special tokens of DeepSeek-V2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_BEGIN, normalized=False), AddedToken(_END, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BEGIN,
        "eos_token": _END,
        "chat_template": TEMPLATE,
        "model_max_length": 163840,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _write_deepseek_v2(folder: Path, layout: str, seed: int) -> None:
    from safetensors.numpy import save_file

    config = _deepseek_v2(layout)
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in DeepseekV2Config.read(config).tensors().items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float32)
        else:
            # large enough that tokens depend on attention and experts, not on the embedding alone
            scale = 1.0 if "embed_tokens" in name else 2.0 * shape[-1] ** -0.5
            tensors[name] = (random.standard_normal(shape) * scale).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _byte_tokenizer(folder)


_WRITERS: Final[dict[str, Callable[[Path, str, int], None]]] = {"deepseek_v2": _write_deepseek_v2}


def tiny_checkpoint(model: str, folder: str | Path, *, layout: str = "lite", seed: int = 0) -> Path:
    """Write a small random checkpoint of `model` into `folder`, which is made.

    Args:
        model: `deepseek_v2`.
        layout: `lite` or `full`, where the model has two.
        seed: of the weights.

    Raises:
        ValueError: a model or layout that is not known.
    """
    if model not in _WRITERS:
        raise ValueError(f"no tiny checkpoint of {model!r}; there are: {', '.join(_WRITERS)}")
    if layout not in ("lite", "full"):
        raise ValueError(f"layout {layout!r}: give lite or full")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _WRITERS[model](folder, layout, seed)
    return folder
