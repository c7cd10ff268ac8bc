"""What a pool of KV pages is: the part of a configuration."""

from __future__ import annotations

import msgspec


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
