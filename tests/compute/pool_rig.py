"""A memory manager with a pool of two tiers, for tests of what an engine does with it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.identity import PageHash
from omni_flow.data.launch import start
from omni_flow.data.messages import L2
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig


class PoolRig:
    """A manager with L1 and L2, its mover, and a client of it."""

    def __init__(self, folder: Path, l1_pages: int = 200, **more: Any) -> None:
        self.path = str(folder / "m.sock")
        pool = PoolSpec(name="kv", page_bytes=4096, l1_pages=l1_pages, l2_pages=200, **more)
        self.manager = start(ServerConfig(path=self.path, pools=(pool,), movers=(("copy",),), huge=False))
        self.client = MemoryManagerClient(self.path)

    def mover(self) -> int:
        """Process id of the mover, once it is there."""
        while True:
            for row in self.client.inspect():
                if row["role"] == "mover":
                    return int(row["pid"])
            self.client.wait_end(0.02)

    @contextlib.contextmanager
    def mover_stopped(self) -> Iterator[None]:
        """The mover stands still meanwhile."""
        pid = self.mover()
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def in_l2(self, count: int) -> list[PageHash]:
        return self.pages(count, L2)

    def pages(self, count: int, tier: int) -> list[PageHash]:
        keys = [PageHash(os.urandom(32)) for _ in range(count)]
        room = self.client.reserve("kv", count, tier=tier)
        self.client.commit("kv", room.token, keys)
        return keys

    def close(self) -> None:
        try:
            self.client.close()
            self.manager.terminate()
            self.manager.wait(20)
        finally:
            self.manager.kill()
