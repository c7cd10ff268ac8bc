"""What a pool of KV pages is: the part of a configuration."""

from __future__ import annotations

from typing import Final

import msgspec

from omni_flow.data.arguments import DAY_S, real, text, whole
from omni_flow.data.errors import BadArgument

_MOST_PAGES: Final = 0xFFFF_FFFE
_MOST_NAME: Final = 100


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pool is.

    Args:
        name: of the pool.
        page_bytes: size of a page (of one object) in bytes.
        l1_pages, l2_pages: slots of the two arenas.
        l3_pages: objects L3 may hold beyond those with a slot; 0: no L3.
        padding: L1 slots at the front that are never given out.
        l1_device: the GPU on which L1 lies; -1: CPU memory stands in for it.
        planes: pieces of a page in a device L1, which is layer-major: plane i of page p lies at
            (i · l1_pages + p) · page_bytes / planes. In CPU memory and below, pages are whole.
        policy: eviction policy of L1 and L2.
        high, low: shares of what nobody holds of a tier at which background demotion starts and stops.
        staging: slots of each tier kept for running jobs, never lent to the cache, half of them for jobs that
            somebody waits for; -1: a sixteenth of L1 and a fourth of L2, at most 256, where there is a tier below L1.
        death_quarantine_s: how long slots reserved by a dead session stay closed (DMA still in flight).
        demote: write pages down before dropping them.

    Raises:
        BadArgument: a value that makes no pool, by the name of the pool and of the argument; wherever it comes from.
    """

    name: str
    page_bytes: int
    l1_pages: int
    l2_pages: int = 0
    l3_pages: int = 0
    padding: int = 0
    l1_device: int = -1
    planes: int = 1
    policy: str = "s3fifo"
    high: float = 0.9
    low: float = 0.8
    staging: int = -1
    death_quarantine_s: float = 0.0
    demote: bool = True

    def __post_init__(self) -> None:
        text("a pool's name", self.name, _MOST_NAME)
        if "/" in self.name or not self.name.isprintable():
            raise BadArgument(f"a pool's name: {self.name!r}", "its arenas are NAME/l1 and NAME/l2: leave out slashes")
        pool = f"pool {self.name}: "
        whole(pool + "page_bytes", self.page_bytes, 1)
        whole(pool + "l1_pages", self.l1_pages, 1, _MOST_PAGES)
        whole(pool + "l2_pages", self.l2_pages, 0, _MOST_PAGES)
        whole(pool + "l3_pages", self.l3_pages, 0, _MOST_PAGES)
        whole(pool + "pages of all tiers", self.l1_pages + self.l2_pages + self.l3_pages, 1, _MOST_PAGES)
        whole(pool + "padding", self.padding, 0, self.l1_pages - 1)
        whole(pool + "l1_device", self.l1_device, -1, 1 << 16)
        whole(pool + "planes", self.planes, 1, self.page_bytes)
        if self.page_bytes % self.planes:
            raise BadArgument(f"{pool}{self.page_bytes} page_bytes in {self.planes} planes", "give planes of one size")
        real(pool + "high", self.high, 0.0, 1.0)
        real(pool + "low", self.low, 0.0, self.high)
        whole(pool + "staging", self.staging, -1, _MOST_PAGES)
        real(pool + "death_quarantine_s", self.death_quarantine_s, 0.0, DAY_S)
