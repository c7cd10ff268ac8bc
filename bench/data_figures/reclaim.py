"""`reclaim_seen_ms`, `reclaim_ms`, `reclaim_other_ms`: SIGKILL of a client that holds 150,000 pages.

100,000 pins and 50,000 reservations in batches of 500. Seen: the server has noticed; all: everything is free again;
other: the longest round trip of another client meanwhile.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.kv_pool import PoolSpec

from .tools import Bench, viewer

PINS, ROOMS, BATCH = 100_000, 50_000, 500


def _hold(path: str, ready: int) -> None:
    names = np.random.default_rng(4).integers(0, 1 << 63, (PINS, 4), np.uint64).view(np.uint8)
    client = MemoryManagerClient(path, name="victim")
    for at in range(0, PINS, BATCH):
        client.commit("kv", client.reserve("kv", BATCH).token, names[at : at + BATCH], pin=True)
    for _ in range(0, ROOMS, BATCH):
        client.reserve("kv", BATCH)
    os.write(ready, b"x")
    client.wait_end()


def measure(bench: Bench) -> None:
    """A victim per round; the other client asks for the statistics without pause."""
    pool = PoolSpec(name="kv", page_bytes=16, l1_pages=PINS + ROOMS + 1000)
    with bench.manager(pools=(pool,)) as (pid, path), viewer(path) as client:
        for _ in range(bench.rounds(8)):
            before = client.stats()
            reader, writer = os.pipe()
            victim = os.fork()
            if victim == 0:
                os.sched_setaffinity(0, {bench.cores[-1]})
                _hold(path, writer)
                os._exit(0)
            os.read(reader, 1)
            with bench.pinned(bench.cores[0], bench.cores[-1], pid):
                killed = time.perf_counter()
                os.kill(victim, signal.SIGKILL)
                seen = longest = 0.0
                while True:
                    began = time.perf_counter()
                    now = client.stats()
                    done = time.perf_counter()
                    longest = max(longest, done - began)
                    if not seen and now["sessions_closed"] > before["sessions_closed"]:
                        seen = done - killed
                    if seen and not now["reclaims_running"]:
                        break
                bench.add("reclaim_seen_ms", seen * 1000)
                bench.add("reclaim_ms", (done - killed) * 1000)
                bench.add("reclaim_other_ms", longest * 1000)
            os.waitpid(victim, 0)
            os.close(reader)
            os.close(writer)
        assert client.check() == []
