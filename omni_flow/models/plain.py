"""Plain causal language models in the layout that Llama set: which tensors a checkpoint of them has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_flow.compute.errors import BadCheckpoint

BIASED: Final = frozenset({"qwen2"})
NORMED: Final = frozenset({"qwen3"})
UNREAD: Final = ("rotary_emb.inv_freq", "lm_head.weight")
"""Endings of names that some checkpoints have and nobody reads: tables of old exports, the head of tied embeddings."""


def plain_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of a Llama, Mistral, Qwen2 or Qwen3.

    Raises:
        BadCheckpoint: a field is missing.
    """
    try:
        kind, width, inner = config["model_type"], int(config["hidden_size"]), int(config["intermediate_size"])
        heads = int(config["num_attention_heads"])
        vocabulary, layers = int(config["vocab_size"]), int(config["num_hidden_layers"])
    except KeyError as error:
        raise BadCheckpoint(f"config.json has no {error}", "is it the config of a language model?") from error
    shared = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or width // heads)
    projections = {"q": (heads * head, width), "k": (shared * head, width), "v": (shared * head, width)}
    biased = {*projections} if kind in BIASED else {*projections, "o"} if config.get("attention_bias") else set()
    projections["o"] = (width, heads * head)
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = (width,)
        for name, shape in projections.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = shape
            if name in biased:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = shape[:1]
        for name in ("q_norm", "k_norm") if kind in NORMED else ():
            tensors[f"{prefix}self_attn.{name}.weight"] = (head,)
        for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = shape
            if config.get("mlp_bias"):
                tensors[f"{prefix}mlp.{name}_proj.bias"] = shape[:1]
    tensors["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = (vocabulary, width)
    return tensors
