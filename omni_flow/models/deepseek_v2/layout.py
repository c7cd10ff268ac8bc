"""Config and checkpoint layout of DeepSeek-V2, both sizes (arXiv 2405.04434; official names and shapes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omni_flow.compute.errors import BadCheckpoint

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2Config:
    """The fields of config.json that fix the tensors. `q_lora_rank` is None in the Lite layout."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    first_k_dense_replace: int
    moe_layer_freq: int
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> DeepseekV2Config:
        """
        Raises:
            BadCheckpoint: fields are missing or are not whole numbers.
        """
        given = {field.name: config[field.name] for field in fields(cls) if field.name in config}
        given.setdefault("q_lora_rank", None)
        needed = [f.name for f in fields(cls) if f.name not in given and f.name != "tie_word_embeddings"]
        if needed:
            raise BadCheckpoint(f"config.json lacks {', '.join(needed)}", "is it a DeepSeek-V2 config?")
        bad = [n for n, v in given.items() if not isinstance(v, int) and not (n == "q_lora_rank" and v is None)]
        if bad:
            raise BadCheckpoint(f"config.json: {', '.join(bad)} should be whole numbers", "is it a DeepSeek-V2 config?")
        return cls(**given)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts; the others have one dense MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def _attention(self, at: str) -> dict[str, Shape]:
        hidden, heads = self.hidden_size, self.num_attention_heads
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            shapes: dict[str, Shape] = {"q_proj": (query, hidden)}
        else:
            shapes = {
                "q_a_proj": (self.q_lora_rank, hidden),
                "q_a_layernorm": (self.q_lora_rank,),
                "q_b_proj": (query, self.q_lora_rank),
            }
        shapes |= {
            "kv_a_proj_with_mqa": (self.kv_lora_rank + self.qk_rope_head_dim, hidden),
            "kv_a_layernorm": (self.kv_lora_rank,),
            "kv_b_proj": (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            "o_proj": (hidden, heads * self.v_head_dim),
        }
        return {f"{at}self_attn.{name}.weight": shape for name, shape in shapes.items()}

    def _mlp(self, at: str, width: int) -> dict[str, Shape]:
        hidden = self.hidden_size
        return {
            f"{at}gate_proj.weight": (width, hidden),
            f"{at}up_proj.weight": (width, hidden),
            f"{at}down_proj.weight": (hidden, width),
        }

    def tensors(self) -> dict[str, Shape]:
        """Every tensor of a checkpoint with its shape."""
        hidden = self.hidden_size
        found: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            at = f"model.layers.{layer}."
            found[f"{at}input_layernorm.weight"] = (hidden,)
            found[f"{at}post_attention_layernorm.weight"] = (hidden,)
            found |= self._attention(at)
            if not self.is_moe(layer):
                found |= self._mlp(f"{at}mlp.", self.intermediate_size)
                continue
            found[f"{at}mlp.gate.weight"] = (self.n_routed_experts, hidden)
            for expert in range(self.n_routed_experts):
                found |= self._mlp(f"{at}mlp.experts.{expert}.", self.moe_intermediate_size)
            if self.n_shared_experts:
                found |= self._mlp(f"{at}mlp.shared_experts.", self.n_shared_experts * self.moe_intermediate_size)
        found["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            found["lm_head.weight"] = (self.vocab_size, hidden)
        return found
