"""Where an engine's pages come from: the node's memory manager, or the engine's process alone."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from omni_flow.compute.errors import ComputeError
from omni_flow.data.errors import DataError
from omni_flow.data.identity import PageHash
from omni_flow.data.kv_client import (
    Stored,
    abort_request,
    commit_request,
    per_key,
    probe_request,
    stored_of,
    unpin_request,
)
from omni_flow.data.messages import L1
from omni_flow.data.posting_client import Answer, PostingClient
from omni_flow.data.protocol import MAX_BATCH

log = logging.getLogger("omni_flow.compute")


class LocalPages:
    """Pages of one engine without a memory manager, numbered from 1; sealed ones are kept until room is needed.

    Page 0 is padding, written by padded rows.
    """

    def __init__(self, count: int) -> None:
        self.quota = count
        self.forced = 0
        self._free = list(range(count, 0, -1))
        self._pages: OrderedDict[PageHash, int] = OrderedDict()
        self._keys: dict[int, PageHash] = {}
        self._pins: dict[int, int] = {}

    def take(self, count: int, least: int) -> list[int]:
        for key in list(self._pages):
            if len(self._free) >= least:
                break
            if not self._pins.get(self._pages[key]):
                self._drop(key)
        if len(self._free) < least:
            raise ComputeError(f"{least} pages wanted, {len(self._free)} of {self.quota} free", "stay within the quota")
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def give(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))

    def seal(self, pages: Sequence[int], keys: Sequence[PageHash]) -> Callable[[], list[int]]:
        kept = []
        for page, key in zip(pages, keys, strict=True):
            there = self._pages.setdefault(key, page)
            self._keys[there] = key
            self._pins[there] = self._pins.get(there, 0) + 1
            kept.append(there)
        return lambda: kept

    def known(self, keys: Sequence[PageHash]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._pages), len(keys))

    def absent(self, keys: Sequence[PageHash]) -> Callable[[], set[PageHash]]:
        missing = {key for key in keys if key not in self._pages}
        return lambda: missing

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


class PoolPages:
    """Pages of a KV pool of the node's memory manager: its L1 slots, shared with every other engine of the node.

    Everything leased or pinned goes back when the connection ends. What nothing here depends on is posted: the thread
    waits for leases, look-ups and, once per batch, for what became of the pages it sealed.

    Args:
        client: a connection of its own; its quota in `pool` must be at least `quota` and one lot (equal pages that
            another engine has sealed first are pinned before the own copy is given back).
        quota: pages.
        patience: seconds that a lease waits for cached pages in its way to be written down a tier; all requests of the
            engine wait with it.
    """

    def __init__(self, client: PostingClient, pool: str, quota: int, *, patience: float = 5.0) -> None:
        self.quota = quota
        self.pool = pool
        self._client = client
        self._patience = patience
        self.forced = 0
        self._leased: dict[int, tuple[int, int]] = {}
        self._pins: dict[int, list[tuple[int, int]]] = {}

    def take(self, count: int, least: int) -> list[int]:
        pages: list[int] = []
        try:
            for start in range(0, count, MAX_BATCH):
                wanted = min(count - start, MAX_BATCH)
                pages += self._take(wanted, min(wanted, max(least - len(pages), 0)))
        except DataError:
            self.give(pages)
            raise
        return pages

    def _take(self, count: int, least: int) -> list[int]:
        room = self._client.reserve(self.pool, count, least=least, timeout=self._patience)
        if room.forced:
            log.warning("cached pages were dropped: within %s s nobody wrote them down a tier", self._patience)
            self.forced += 1
        pages: list[int] = room.slots.tolist()
        for at, page in enumerate(pages):
            self._leased[page] = (room.token, at)
        return pages

    def give(self, pages: Sequence[int]) -> None:
        for token, positions in _grouped(self._leased.pop(page) for page in pages).items():
            self._client.post(abort_request(self.pool, token, positions))

    def seal(self, pages: Sequence[int], keys: Sequence[PageHash]) -> Callable[[], list[int]]:
        by_token: dict[int, list[tuple[int, int, PageHash]]] = {}
        for page, key in zip(pages, keys, strict=True):
            token, position = self._leased[page]
            by_token.setdefault(token, []).append((page, position, key))
        asked: list[tuple[list[tuple[int, int, PageHash]], Answer[Stored]]] = []
        for token, mine in by_token.items():
            for start in range(0, len(mine), MAX_BATCH):
                batch = mine[start : start + MAX_BATCH]
                positions = [position for _, position, _ in batch]
                request = commit_request(self.pool, token, [key for *_, key in batch], positions, True, True)
                asked.append((batch, self._client.post(request, stored_of)))

        def finish() -> list[int]:
            where: dict[PageHash, int] = {}
            for batch, answer in asked:
                stored = answer()
                answers = zip(batch, stored.status.tolist(), stored.slots.tolist(), strict=True)
                for at, ((page, _, key), duplicate, slot) in enumerate(answers):
                    where[key] = slot
                    self._pins.setdefault(slot, []).append((stored.lease, at))
                    if not duplicate:
                        del self._leased[page]
            return [where[key] for key in keys]

        return finish

    def find(self, keys: Sequence[PageHash]) -> list[int]:
        found: list[int] = []
        for start in range(0, len(keys), MAX_BATCH):
            batch = keys[start : start + MAX_BATCH]
            match = self._client.lookup(self.pool, batch, pin=True, tiers=L1)
            slots: list[int] = match.slots.tolist()
            for at, slot in enumerate(slots):
                self._pins.setdefault(slot, []).append((match.lease, at))
            found += slots
            if match.pages < len(batch):
                break
        return found

    def known(self, keys: Sequence[PageHash]) -> int:
        tiers = self.tiers(keys)()
        return next((at for at, tier in enumerate(tiers) if not tier & L1), len(tiers))

    def absent(self, keys: Sequence[PageHash]) -> Callable[[], set[PageHash]]:
        tiers = self.tiers(keys)
        return lambda: {key for key, tier in zip(keys, tiers(), strict=True) if not tier & L1}

    def tiers(self, keys: Sequence[PageHash]) -> Callable[[], list[int]]:
        """In which tiers each page is; 0: in none."""
        batches = (keys[start : start + MAX_BATCH] for start in range(0, len(keys), MAX_BATCH))
        asked = [self._client.post(probe_request(self.pool, batch), per_key) for batch in batches]
        return lambda: [tier for answer in asked for tier in answer().tolist()]

    def unpin(self, pages: Sequence[int]) -> None:
        gone = []
        for page in pages:
            held = self._pins[page]
            gone.append(held.pop())
            if not held:
                del self._pins[page]
        for lease, positions in _grouped(gone).items():
            self._client.post(unpin_request(self.pool, lease, positions))


def lower(tiers: Sequence[int]) -> dict[int, int]:
    """Of pages in these tiers, those of the longest prefix that is in some tier which are not in L1: place → tiers."""
    end = tiers.index(0) if 0 in tiers else len(tiers)
    return {at: tier for at, tier in enumerate(tiers[:end]) if not tier & L1}


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Positions by token or lease."""
    groups: dict[int, list[int]] = {}
    for owner, position in pairs:
        groups.setdefault(owner, []).append(position)
    return groups
