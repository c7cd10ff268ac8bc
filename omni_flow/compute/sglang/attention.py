"""Attention on a plain CPU over SGLang's paged KV pool, in PyTorch.

It goes by SGLang's name `torch_native` because SGLang decides by that name where it must not use triton. Against the
backend of that name it computes the new rows only (SGLang's recomputes the whole prefix) and gathers the page table
once per forward instead of once per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_flow.compute.errors import BadCheckpoint
from omni_flow.compute.sglang.buffers import PagedRows

if TYPE_CHECKING:
    import torch


class Rows(NamedTuple):
    """One sequence of a forward: its new rows are the last `new` of `places`.

    Args:
        places: where the tokens of the sequence lie, see `PagedRows.places`.
        new: how many new rows.
        mask: which keys a row sees (new, len(places)); None: all.
    """

    places: torch.Tensor
    new: int
    mask: torch.Tensor | None


def row_mask(length: int, count: int, window: int = -1) -> torch.Tensor | None:
    """The mask of the last `count` of `length` tokens.

    Args:
        window: how many tokens before itself a row sees; negative: all.

    Returns:
        bool (count, length), or None where every row sees everything.
    """
    import torch

    wide = window < 0 or window >= length - 1
    if wide and count == 1:
        return None
    mask = torch.ones(count, length, dtype=torch.bool).tril_(length - count)
    if not wide:
        mask.triu_(length - count - window)
    return mask


def attend(
    pool: Any, layer: Any, out_places: torch.Tensor, rows: Sequence[Rows], q: Any, k: Any, v: Any, save: bool
) -> torch.Tensor:
    """Write K and V of the new rows and attend.

    Args:
        pool: SGLang's, over a page-major arena.
        out_places: of the new rows of all sequences, in their order.
        q, k, v: (new rows, heads * width) or (new rows, heads, width).
        save: false where K and V are written already.

    Returns:
        (new rows, heads * width of V).
    """
    from torch.nn.functional import scaled_dot_product_attention

    paged: PagedRows = pool.omni_rows
    plane = layer.layer_id - pool.start_layer
    latent = layer.v_head_dim if hasattr(pool, "kv_buffer") else 0
    if save and k is not None:
        paged.put(out_places, plane, k)
        if not latent:
            paged.put(out_places, plane + pool.layer_num, v)
    heads, shared = layer.tp_q_head_num, layer.tp_k_head_num
    q = q.reshape(-1, heads, layer.qk_head_dim)
    out: torch.Tensor = q.new_empty(q.shape[0], heads, layer.v_head_dim)
    at = 0
    for row in rows:
        key = paged.get(row.places, plane).to(q.dtype)
        value = key[..., :latent] if latent else paged.get(row.places, plane + pool.layer_num).to(q.dtype)
        query = q[at : at + row.new].transpose(0, 1)
        got = scaled_dot_product_attention(
            query[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=row.mask,
            scale=layer.scaling,
            enable_gqa=heads != shared,
        )
        out[at : at + row.new] = got[0].transpose(0, 1)
        at += row.new
    return out.flatten(1)


def make_backend(runner: Any) -> Any:
    """Factory for SGLang's attention registry.

    Raises:
        BadCheckpoint: the model caps its attention logits, which this attention does not.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if any(getattr(module, "logit_cap", 0) for module in runner.model.modules()):
        raise BadCheckpoint(f"{type(runner.model).__name__} caps its attention logits", "run it on a GPU")

    class CpuAttention(TorchNativeAttnBackend):  # type: ignore[misc]
        """See the module."""

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            lengths = forward_batch.seq_lens_cpu.tolist()
            counts = forward_batch.extend_seq_lens_cpu if forward_batch.forward_mode.is_extend() else [1] * len(lengths)
            table = self.req_to_token_pool.req_to_token
            paged: PagedRows = self.token_to_kv_pool.omni_rows
            self._out = paged.places(forward_batch.out_cache_loc.long())
            self._rows: list[Rows] = []
            for row, length, count in zip(forward_batch.req_pool_indices.tolist(), lengths, counts, strict=True):
                places = paged.places(table[row, :length].long())
                self._rows.append(Rows(places, count, row_mask(length, count)))
            self._windows: dict[int, list[Rows]] = {}

        def _rows_of(self, layer: Any) -> list[Rows]:
            window = layer.sliding_window_size
            if window is None or window < 0:
                return self._rows
            if window not in self._windows:
                self._windows[window] = [
                    row._replace(mask=row_mask(len(row.places), row.new, window)) for row in self._rows
                ]
            return self._windows[window]

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
        ) -> Any:
            return attend(self.token_to_kv_pool, layer, self._out, self._rows_of(layer), q, k, v, save_kv_cache)

        forward_decode = forward_extend

    return CpuAttention(runner)
