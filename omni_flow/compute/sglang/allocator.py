"""SGLang's page allocator, replaced: page numbers are decided on the host, per request, from the page book."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_flow.compute.errors import ComputeError
from omni_flow.compute.sglang.takeover import Takeover, current


def own_pages(request: Any) -> list[int]:
    """The pages of a request that are not sealed yet; they follow the chain of `request.last_node`."""
    own: list[int] = request.__dict__.setdefault("omni_own", [])
    return own


def remember_batch(batch: Any, *_: Any, **__: Any) -> None:
    """Hook before SGLang allocates for a batch: the allocator is not told which requests it serves."""
    current().batch = batch


def to_device(host: npt.NDArray[np.int64], device: Any) -> Any:
    """Copy to the device without waiting for it."""
    import torch

    tensor = torch.from_numpy(host)
    return tensor if torch.device(device).type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@cache
def allocator_class() -> type:
    """The class; made on first use because its base needs sglang."""
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

    class OmniAllocator(BaseTokenToKVPoolAllocator):  # type: ignore[misc]
        """See the module. Sizes are in tokens, as SGLang asks."""

        def __init__(self, size: int, page_size: int, dtype: Any, device: str, kvcache: Any, need_sort: bool) -> None:
            super().__init__(size, page_size, dtype, device, kvcache, need_sort)
            self.takeover: Takeover = current()
            self.num_pages = size // page_size
            if page_size != self.takeover.page_size or self.num_pages > self.takeover.book.source.quota:
                raise ComputeError(
                    f"SGLang sized {self.num_pages} pages of {page_size} tokens, the pool gives "
                    f"{self.takeover.book.source.quota} of {self.takeover.page_size}",
                    "max_total_tokens must be the quota",
                )
            self.clear()

        def clear(self) -> None:
            self.takeover.book.reset()
            self.is_not_in_free_group = True
            self.free_group: list[Any] = []
            self._in_page = np.arange(self.page_size)
            self._requests: list[Any] = []
            self._lengths = self._slots = np.empty(0, np.int64)

        def available_size(self) -> int:
            size: int = self.page_size
            return self.takeover.book.available * size

        def alloc(self, need_size: int) -> Any:
            raise ComputeError("SGLang asked for single slots", "page_size must be over 1")

        def alloc_extend(
            self,
            prefix_lens: Any,
            prefix_lens_cpu: Any,
            seq_lens: Any,
            seq_lens_cpu: Any,
            last_loc: Any,
            extend_num_tokens: int,
            num_new_pages: int | None = None,
        ) -> Any:
            size = self.page_size
            rows = list(zip(self.takeover.batch.reqs, prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), strict=True))
            # a fixed-row session has pages for its rows already when its context is computed
            wanted = [
                max(0, -(-stop // size) - request.last_node.depth - len(own_pages(request)))
                for request, _, stop in rows
            ]
            taken = self.takeover.book.take(sum(wanted))
            pages: list[int] = []
            cuts: list[tuple[int, int]] = []
            at = 0
            for (request, start, stop), count in zip(rows, wanted, strict=True):
                own, base = own_pages(request), request.last_node.depth
                own += taken[at : at + count]
                at += count
                begin = len(pages) * size + start % size
                cuts.append((begin, begin + stop - start))
                pages += own[start // size - base :]
            slots = (np.asarray(pages, np.int64)[:, None] * size + self._in_page).reshape(-1)
            return to_device(np.concatenate([slots[begin:end] for begin, end in cuts]), self.device)

        def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
            """A row whose page goes on lies one behind where it lay in the last step, if that was of the same rows."""
            size, requests = self.page_size, self.takeover.batch.reqs
            lengths = seq_lens_cpu.numpy()
            again = requests == self._requests and bool((lengths == self._lengths + 1).all())
            if again:
                out = self._slots + 1
                new = np.flatnonzero(lengths % size == 1).tolist()
            else:
                out = np.empty(len(lengths), np.int64)
                new = list(range(len(lengths)))
            for at in new:
                own, position = own_pages(requests[at]), int(lengths[at]) - 1
                page = position // size - requests[at].last_node.depth
                if page == len(own):
                    own += self.takeover.book.take(1)
                out[at] = own[page] * size + position % size
            self._requests, self._lengths, self._slots = list(requests), lengths.copy(), out
            return to_device(out.copy(), self.device)

        def free(self, free_index: Any) -> None:
            if free_index.numel():
                raise ComputeError(f"SGLang freed {free_index.numel()} slots itself", "pages go back through the cache")

    return OmniAllocator
