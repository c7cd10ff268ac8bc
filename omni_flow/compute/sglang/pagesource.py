"""Where an engine's pages come from: the node's memory manager, or the engine's process alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from omni_flow.compute.errors import ComputeError
from omni_flow.data.identity import PageHash


class LocalPages:
    """Pages of one engine without a memory manager, numbered from 1; sealed ones are kept until room is needed.

    Page 0 is padding, written by padded rows.
    """

    def __init__(self, count: int) -> None:
        self.quota = count
        self._free = list(range(count, 0, -1))
        self._pages: OrderedDict[PageHash, int] = OrderedDict()
        self._keys: dict[int, PageHash] = {}
        self._pins: dict[int, int] = {}

    def take(self, count: int, least: int) -> list[int]:
        for key in list(self._pages):
            if len(self._free) >= count:
                break
            if not self._pins.get(self._pages[key]):
                self._drop(key)
        if len(self._free) < least:
            raise ComputeError(f"{least} pages wanted, {len(self._free)} of {self.quota} free", "stay within the quota")
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def give(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))

    def seal(self, pages: Sequence[int], keys: Sequence[PageHash]) -> list[int]:
        kept = []
        for page, key in zip(pages, keys, strict=True):
            there = self._pages.setdefault(key, page)
            self._keys[there] = key
            self._pins[there] = self._pins.get(there, 0) + 1
            kept.append(there)
        return kept

    def find(self, keys: Sequence[PageHash]) -> list[int]:
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            self._pages.move_to_end(key)
            self._pins[page] = self._pins.get(page, 0) + 1
            found.append(page)
        return found

    def unpin(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._pins[page] -= 1
            if not self._pins[page]:
                del self._pins[page]

    def _drop(self, key: PageHash) -> None:
        page = self._pages.pop(key)
        del self._keys[page]
        self._free.append(page)
