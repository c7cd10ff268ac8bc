"""`lookup_pin_pages_per_s[_one_core]`, `reserve_commit_pages_per_s[_one_core]`, `bytes_per_page`.

Batches of 512 over an index of 2^20 pages; looked-up keys are drawn at random over the whole index.
"""

from __future__ import annotations

import time

import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.pool_spec import PoolSpec

from .tools import Bench

PAGES = 1 << 20
SPARE = 1 << 17
BATCH = 512


def measure(bench: Bench) -> None:
    """Fill once; then per pinning alternate look-ups and stores."""
    pool = PoolSpec(name="kv", page_bytes=16, l1_pages=PAGES + SPARE)
    names = np.random.default_rng(1).integers(0, 1 << 63, (PAGES + SPARE, 4), np.uint64).view(np.uint8)
    with bench.manager(pools=(pool,)) as (pid, path), MemoryManagerClient(path) as client:
        for at in range(0, PAGES, 4096):
            client.commit("kv", client.reserve("kv", 4096).token, names[at : at + 4096])
        stats = client.stats()
        bench.add(
            "bytes_per_page", stats["pool_metadata_bytes/kv"] / stats["pool_objects/kv"] * PAGES / (PAGES + SPARE)
        )
        order = np.random.default_rng(2).permutation(PAGES)
        fresh = PAGES
        for suffix, server, mine in bench.pinnings():
            with bench.pinned(server, mine, pid):
                for at in range(0, bench.rounds(96) * BATCH, BATCH):
                    keys = names[order[at : at + BATCH]]
                    began = time.perf_counter()
                    found = client.lookup("kv", keys)
                    spent = time.perf_counter() - began
                    assert found.pages == BATCH
                    client.unpin("kv", found.lease)
                    bench.add(f"lookup_pin_pages_per_s{suffix}", BATCH / spent)
                    keys = names[fresh : fresh + BATCH]
                    fresh += BATCH
                    began = time.perf_counter()
                    room = client.reserve("kv", BATCH)
                    client.commit("kv", room.token, keys)
                    bench.add(f"reserve_commit_pages_per_s{suffix}", BATCH / (time.perf_counter() - began))
        assert client.check() == []
