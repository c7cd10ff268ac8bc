"""`reclaim_seen_ms`, `reclaim_ms`, `reclaim_other_ms`: SIGKILL of a client that holds 150,000 pages.

100,000 pins and 50,000 reservations in batches of 500, held by a process that has loaded what a client needs and no
more: the kernel closes its connection only after it has torn its memory down. Seen: the server has noticed, by its
clock; all: everything is free again; other: the longest round trip of another client meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from omni_flow.data.kv_pool import PoolSpec

from .tools import Bench, viewer

PINS, ROOMS, BATCH = 100_000, 50_000, 500


_VICTIM = f"""
import os, sys
from omni_flow.data.client import MemoryManagerClient
os.sched_setaffinity(0, {{int(sys.argv[2])}})
client = MemoryManagerClient(sys.argv[1], name="victim")
for _ in range(0, {PINS}, {BATCH}):
    names = [os.urandom(32) for _ in range({BATCH})]
    client.commit("kv", client.reserve("kv", {BATCH}).token, names, pin=True)
for _ in range(0, {ROOMS}, {BATCH}):
    client.reserve("kv", {BATCH})
print("holds", flush=True)
client.wait_end()
"""


def measure(bench: Bench) -> None:
    """A victim per round; the other client asks for the statistics without pause."""
    pool = PoolSpec(name="kv", page_bytes=16, l1_pages=PINS + ROOMS + 1000)
    with bench.manager(pools=(pool,)) as (pid, path), viewer(path) as client:
        for _ in range(bench.rounds(8)):
            before = client.stats()
            command = [sys.executable, "-c", _VICTIM, path, str(bench.cores[-1])]
            victim = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"holds\n"
            with bench.pinned(bench.cores[0], bench.cores[-1], pid):
                killed = time.monotonic()
                os.kill(victim.pid, signal.SIGKILL)
                longest = 0.0
                while True:
                    began = time.monotonic()
                    now = client.stats()
                    done = time.monotonic()
                    longest = max(longest, done - began)
                    if now["sessions_closed"] > before["sessions_closed"] and not now["reclaims_running"]:
                        break
                bench.add("reclaim_seen_ms", (now["reclaim_seen_at"] - killed) * 1000)
                bench.add("reclaim_ms", (done - killed) * 1000)
                bench.add("reclaim_other_ms", longest * 1000)
            victim.wait()
            victim.stdout.close()
        assert client.check() == []
