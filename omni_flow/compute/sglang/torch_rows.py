"""Attention of fixed rows on a plain CPU, see `attention.py`. Imported in an engine process only: it needs sglang."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from omni_flow.compute.sglang.attention import Rows, attend
from omni_flow.compute.sglang.buffers import PagedRows
from omni_flow.compute.sglang.rows_inputs import RowInputs


class TorchRows(AttentionBackend):  # type: ignore[misc]
    """An attention backend for SGLang's models while they compute fixed rows.

    Args:
        runner: SGLang's model runner.
    """

    def __init__(self, runner: Any) -> None:
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool

    def begin(self, inputs: RowInputs) -> None:
        """The forward that follows reads these."""
        paged: PagedRows = self.token_to_kv_pool.omni_rows
        starts, contexts = inputs.starts.tolist(), inputs.context_starts.tolist()
        self._out = paged.places(inputs.slots)
        self._rows: dict[int, list[Rows]] = {window: [] for window in inputs.bounds}
        for at, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                continue
            slots = (inputs.context[contexts[at] : contexts[at + 1]], inputs.slots[start:end])
            places = paged.places(torch.cat(slots))
            for window, bounds in inputs.bounds.items():
                mask = seen(bounds[:, start:end], len(places))
                self._rows[window].append(Rows(places, end - start, mask))

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """See `attend`."""
        rows = self._rows[layer.sliding_window_size]
        return attend(self.token_to_kv_pool, layer, self._out, rows, q, k, v, save_kv_cache)


def seen(bounds: torch.Tensor, length: int) -> torch.Tensor | None:
    """The mask that `RowInputs.bounds` (3, rows) of a sequence of so many keys mean, as `row_mask` gives it."""
    last, fixed, first = bounds[:, :, None]
    keys = torch.arange(length)
    mask = (keys <= last) & ((keys >= fixed) | (keys >= first))
    return None if mask.all() else mask
