"""A real memory manager with the copy mover and the SSD mover, and pages whose bytes follow from their keys."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.launch import start
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

PAGE = 8192
POOL = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=16, l2_pages=32, l3_pages=2000)
CAP = 16 << 20


@contextlib.contextmanager
def node(
    folder: Path, disk: Path, *, pools: tuple[PoolSpec, ...] = (POOL,), stop: int = signal.SIGTERM
) -> Iterator[str]:
    """A memory manager with the copy mover and the SSD mover; yields the path of its socket, ends it by `stop`."""
    path = str(folder / "memory.sock")
    ssd = ("{python}", "-m", "omni_flow.data.ssd.mover", "{path}", str(disk), str(CAP), "--segment", "262144")
    process = start(ServerConfig(path=path, pools=pools, movers=(("copy",), ssd), huge=False), log=path + ".log")
    try:
        yield path
    finally:
        process.send_signal(stop)
        process.wait(20)


def when_on(client: MemoryManagerClient) -> None:
    """Returns when both movers are connected and L3 is on."""
    while not client.stats().get("pool_l3_on/kv") or client.stats()["job_movers"] < 2:
        client.wait_end(0.01)


def names(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


def fill(client: MemoryManagerClient, keys: np.ndarray) -> None:
    """Writes pages that repeat their key."""
    pages = client.arena("kv/l1", write=True).pages(PAGE, POOL.l1_pages)
    for at in range(0, len(keys), 8):
        part = keys[at : at + 8]
        room = client.reserve("kv", len(part), timeout=20)
        pages[room.slots] = np.tile(part, PAGE // 32)
        client.commit("kv", room.token, part)


def right(client: MemoryManagerClient, keys: np.ndarray) -> int:
    """Brings the pages up one by one; returns how many came, fails on wrong bytes."""
    pages = client.arena("kv/l1").pages(PAGE, POOL.l1_pages)
    there = 0
    for key in keys:
        if not client.fetch("kv", key[None], timeout=20).all():
            continue
        found = client.lookup("kv", key[None], tiers=1)
        if found.pages:
            assert (pages[found.slots[0]] == np.tile(key, PAGE // 32)).all()
            client.unpin("kv", found.lease)
            there += 1
    return there
