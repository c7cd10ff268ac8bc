"""How much KV a model's tokens take and what it is called in the identity of pages. Pure: from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_flow.compute.errors import BadCheckpoint

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV of one model.

    Args:
        kind: `mla` (one latent per token and layer) or `gqa` (K and V).
        planes: tensors a token has: layers, times two for K and V.
        heads: KV heads (1 for a latent).
        width: values per head.
    """

    kind: str
    planes: int
    heads: int
    width: int

    @property
    def name(self) -> str:
        """What it is called in a namespace."""
        return f"{self.kind}:{self.planes}x{self.heads}x{self.width}"

    def token_bytes(self, dtype: str) -> int:
        """Bytes of one token."""
        return self.planes * self.heads * self.width * DTYPE_BYTES[dtype]

    def page_bytes(self, page_size: int, dtype: str) -> int:
        """Bytes of one page: `PoolSpec.page_bytes` of a pool for this model."""
        return page_size * self.token_bytes(dtype)


def kv_layout(config: Mapping[str, Any]) -> KvLayout:
    """The layout of a transformers config.

    Raises:
        BadCheckpoint: a field is missing.
    """
    try:
        layers = int(config["num_hidden_layers"])
        if "kv_lora_rank" in config:
            return KvLayout("mla", layers, 1, int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
        heads = int(config["num_attention_heads"])
        width = config.get("head_dim") or int(config["hidden_size"]) // heads
        return KvLayout("gqa", 2 * layers, int(config.get("num_key_value_heads") or heads), int(width))
    except KeyError as error:
        raise BadCheckpoint(f"config.json has no {error}", "is it the config of a language model?") from error
