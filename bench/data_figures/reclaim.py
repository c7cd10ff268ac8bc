"""`reclaim_seen_ms`, `reclaim_ms`, `reclaim_other_ms`: SIGKILL of a client that holds 150,000 pages.

100,000 pins and 50,000 reservations in batches of 500, held by a process that has loaded what a client needs and no
more: the kernel closes its connection only after it has torn its memory down. Seen: the server has noticed, by its
clock, while nobody asks it anything; all: everything is free again; other: the longest round trip of another client
that asks for the statistics without pause meanwhile (on two cores it shares one with the teardown, which then takes
longer: `reclaim_seen_busy_ms`). `floor_seen_ms`: what no manager can be faster than, the end of a bare connection of a
killed process that has imported numpy and msgspec. All in turn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from omni_flow.data.pool_spec import PoolSpec

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


_BARE = """
import os, sys
import msgspec, numpy
os.sched_setaffinity(0, {int(sys.argv[2])})
print("holds", flush=True)
os.read(int(sys.argv[1]), 1)
"""


@contextlib.contextmanager
def _victim(code: str, where: str, core: int, fds: Sequence[int] = ()) -> Iterator[int]:
    """A process that runs `code` and has said that it holds what it is to hold: its pid. To be killed by the caller."""
    command = [sys.executable, "-c", code, where, str(core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=fds) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        yield process.pid


def _floor(bench: Bench) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, _victim(_BARE, str(there.fileno()), bench.cores[-1], (there.fileno(),)) as pid:
        there.close()
        with bench.pinned(bench.cores[0], bench.cores[0]):
            killed = _kill(pid)
            here.recv(1)
            bench.add("floor_seen_ms", (time.monotonic() - killed) * 1000)


def _kill(pid: int) -> float:
    """When it was killed."""
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return killed


def measure(bench: Bench) -> None:
    """Two victims a round: one whose end nobody disturbs, one beside a busy client."""
    pool = PoolSpec(name="kv", page_bytes=16, l1_pages=PINS + ROOMS + 1000)
    first, last = bench.cores[0], bench.cores[-1]
    with bench.manager(pools=(pool,)) as (pid, path), viewer(path) as client:

        def until_free(closed: int) -> tuple[dict[str, int | float], float]:
            """The first statistics with everything free again, and the longest round trip until then (s)."""
            longest = 0.0
            while True:
                began = time.monotonic()
                now = client.stats()
                longest = max(longest, time.monotonic() - began)
                if now["sessions_closed"] == closed and not now["reclaims_running"]:
                    return now, longest

        for _ in range(bench.rounds(8)):
            _floor(bench)
            closed = int(client.stats()["sessions_closed"])
            with _victim(_VICTIM, path, last) as victim, bench.pinned(first, last, pid):
                killed = _kill(victim)
                os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
                now, _ = until_free(closed + 1)
                bench.add("reclaim_seen_ms", (now["reclaim_seen_at"] - killed) * 1000)
            with _victim(_VICTIM, path, last) as victim, bench.pinned(first, last, pid):
                killed = _kill(victim)
                now, longest = until_free(closed + 2)
                bench.add("reclaim_ms", (time.monotonic() - killed) * 1000)
                bench.add("reclaim_other_ms", longest * 1000)
                bench.add("reclaim_seen_busy_ms", (now["reclaim_seen_at"] - killed) * 1000)
        assert client.check() == []
