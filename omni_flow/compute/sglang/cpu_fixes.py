"""What SGLang 0.5.17 needs to run models on a CPU without AMX, all through its own registries.

Each fix names the failure it mends.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, Final

ATTENTION: Final = "torch_native"
HANDLERS: Final = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry"


def rope(
    original: Any,
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: Any = None,
    dtype: Any = None,
    partial_rotary_factor: float = 1.0,
    device: Any = None,
) -> Any:
    """Around `get_rope_cpu`, which asserts DeepSeek's YaRN: everything else goes to the general function."""
    if rope_scaling is not None and rope_scaling.get("rope_type") == "deepseek_yarn":
        return original(
            head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor, device
        )
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    if rope_scaling is not None and rope_scaling.get("rope_type") == "default":
        rope_scaling = None
    return get_rope(
        head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor
    )


def experts(original: Any, layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
    """Around `moe_forward_native`, which counts an expert once per row: wrong where a row names one twice, and slow."""
    import torch
    from torch.nn import functional

    plain = config.activation == "silu" and config.gemm1_alpha is None
    if not plain or getattr(layer, "w13_weight_bias", None) is not None:
        return original(layer, x, topk_output, config)
    weights, ids, _ = topk_output
    flat = ids.reshape(-1).long()
    order = flat.argsort()
    counts = torch.bincount(flat, minlength=layer.num_experts).tolist()
    rows = x[order // ids.shape[1]]
    made = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            gate, up = functional.linear(rows[start : start + count], layer.w13_weight[expert]).chunk(2, -1)
            made[start : start + count] = functional.linear(functional.silu(gate) * up, layer.w2_weight[expert])
            start += count
    back = torch.empty_like(made)
    back[order] = made
    return (back.view(*ids.shape, -1).to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def zero_experts(_result: None, _method: Any, layer: Any, *_: Any, **__: Any) -> None:
    """After `UnquantizedFusedMoEMethod.create_weights`: SGLang pads experts on a CPU to a multiple of 64 and leaves the
    padding uninitialised, where its AMX kernels would pack it away."""
    layer.w13_weight.data.zero_()
    layer.w2_weight.data.zero_()


def token_mask(_original: Any, *_grammar: Any, logits: Any, vocab_mask: Any) -> None:
    """Around xgrammar's `apply_vocab_mask`, which SGLang has for GPUs only."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)


def empty_mask(vocab_size: int, batch_size: int) -> Any:
    """Replaces xgrammar's `_allocate_token_bitmask`, which pins its memory for a GPU."""
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)


def no_stream(_context: Any, _name: str) -> None:
    """Replaces `RuntimeContext.get_stream`, which makes a CUDA stream whatever the device."""


def hooks() -> list[tuple[str, str, Callable[..., Any]]]:
    return [
        ("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", "AROUND", rope),
        ("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", "AROUND", experts),
        ("sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.create_weights", "AFTER", zero_experts),
        ("sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask", "REPLACE", empty_mask),
        ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask", "AROUND", token_mask),
        ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask", "AROUND", token_mask),
        ("sglang.srt.runtime_context.RuntimeContext.get_stream", "REPLACE", no_stream),
    ]


def absorbed(_attention: Any, _batch: Any) -> Any:
    """The path of MLA over our attention: absorbed, where SGLang's default would choose MHA for a prefill."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def register() -> None:
    """Attention backend, and the path of MLA for it."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from omni_flow.compute.sglang.attention import make_backend

    register_attention_backend(ATTENTION)(make_backend)
    pkgutil.resolve_name(HANDLERS).register(ATTENTION, absorbed)
