"""What the figures share: pinning, interleaved samples, a memory manager of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.launch import start
from omni_flow.data.server_config import ServerConfig


class Bench:
    """Collects samples; the figure of a key is the median of its samples.

    Args:
        quick: fewer rounds, for a smoke test.
    """

    def __init__(self, quick: bool = False) -> None:
        self.quick = quick
        self.samples: dict[str, list[float]] = {}
        self.notes: dict[str, str] = {}
        self.cores = sorted(os.sched_getaffinity(0))

    def add(self, key: str, value: float) -> None:
        self.samples.setdefault(key, []).append(value)

    def figure(self, key: str) -> float:
        return statistics.median(self.samples[key])

    def rounds(self, full: int) -> int:
        return max(2, full // 8) if self.quick else full

    def pinnings(self) -> list[tuple[str, int, int]]:
        """(suffix of the key, core of the server, core of the client)."""
        first = self.cores[0]
        return [("", first, self.cores[1 % len(self.cores)]), ("_one_core", first, first)]

    @contextlib.contextmanager
    def pinned(self, server: int, client: int, *pids: int) -> Iterator[None]:
        """Pin this process to `client` and the others to `server`, all their threads, for a while."""
        before = os.sched_getaffinity(0)
        for pid in pids:
            os.sched_setaffinity(pid, {server})
        os.sched_setaffinity(0, {client})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(pid, before)

    @contextlib.contextmanager
    def manager(self, **options: Any) -> Iterator[tuple[int, str]]:
        """A memory manager: (pid, path)."""
        with tempfile.TemporaryDirectory(prefix="omni-bench") as folder:
            process = start(ServerConfig(path=f"{folder}/memory.sock", **options))
            try:
                yield process.pid, f"{folder}/memory.sock"
            finally:
                process.terminate()
                process.wait()


def median_s(action: Callable[[], object], times: int) -> float:
    """Median duration of an action in seconds."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


@contextlib.contextmanager
def echo_server() -> Iterator[tuple[int, socket.socket]]:
    """A bare SEQPACKET echo in a process of its own: (pid, socket to it)."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        here.close()
        buffer = bytearray(4096)
        while length := there.recv_into(buffer):
            there.send(memoryview(buffer)[:length])
        os._exit(0)
    there.close()
    try:
        yield pid, here
    finally:
        here.close()
        os.waitpid(pid, 0)


def viewer(path: str) -> MemoryManagerClient:
    return MemoryManagerClient(path, name="bench", role="viewer")
