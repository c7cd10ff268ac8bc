"""Attention of fixed rows on a GPU: SGLang's extend kernel, told by a function of its own which keys a row sees.

The kernel's mask would be a matrix of rows by context and rows; here three numbers a row say the same. They, and all
lengths, are read on the device, so a captured graph serves every context and every flag. Imported in an engine process
only: it needs sglang and triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.triton_backend import logit_capping_mod

from omni_flow.compute.sglang.rows_inputs import RowInputs


@triton.jit
def seen(qk, _q_pos, kv_pos, q_idx, _head, _mask, bounds, stride, _stride_h, size):  # type: ignore[no-untyped-def]
    """SGLang's `score_mod` over `RowInputs.bounds`: (3, 1, size) with `stride` between the three."""
    there = q_idx < size
    last = tl.load(bounds + q_idx, mask=there, other=0)
    fixed = tl.load(bounds + stride + q_idx, mask=there, other=0)
    first = tl.load(bounds + 2 * stride + q_idx, mask=there, other=0)
    return tl.where((kv_pos <= last) & ((kv_pos >= fixed) | (kv_pos >= first)), qk, float("-inf"))


class TritonRows(AttentionBackend):  # type: ignore[misc]
    """An attention backend for SGLang's models.

    Args:
        runner: SGLang's model runner.
    """

    def __init__(self, runner: Any) -> None:
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._page_size = runner.page_size

    def begin(self, inputs: RowInputs) -> None:
        """The forward that follows reads these."""
        self._inputs = inputs

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Any = None,
        k_rope: Any = None,
        sinks: Any = None,
    ) -> Any:
        """Write K and V over those of the rows and attend.

        Args:
            q, k, v: (rows, heads * width) or (rows, heads, width).
            save_kv_cache: false where the model has written K and V itself.
            q_rope, k_rope: (rows, heads, width), the rotated part of q and k where a model gives it apart.

        Returns:
            (rows, heads * width of V).
        """
        inputs, pool = self._inputs, self.token_to_kv_pool
        if q_rope is not None:
            q = torch.cat((q.reshape(*q_rope.shape[:2], -1), q_rope), -1)
            k = torch.cat((k, k_rope), -1)
        if save_kv_cache:
            pool.set_kv_buffer(layer, inputs.slots, k, v)
        out = q.new_empty(inputs.size, layer.tp_q_head_num, layer.v_head_dim)
        extend_attention_fwd(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.contiguous(),
            v.contiguous(),
            out,
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            inputs.starts,
            inputs.context_starts,
            inputs.context,
            custom_mask=None,
            is_causal=False,
            mask_indptr=None,
            max_len_extend=inputs.size,
            k_scale=1.0,
            v_scale=1.0,
            sm_scale=layer.scaling,
            logit_cap=logit_capping_mod(layer.logit_capping_method, layer.logit_cap),
            sinks=sinks,
            xai_temperature_len=layer.xai_temperature_len,
            page_size=self._page_size,
            score_mod=seen,
            aux_tensors=[inputs.bounds[layer.sliding_window_size][:, None]],
        )
        return out.flatten(1)
