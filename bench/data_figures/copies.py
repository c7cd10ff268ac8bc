"""`copyin_ratio_to_memcpy`, `gather_ratio_to_memcpy`: bytes through the arenas over plain copies between private
arrays.

Copy-in: `TempClient.put` of 1 MiB and 16 MiB (the worse counts), allocation and publication included. Gather: 256
scattered 64 KiB pages of L2 into one array. The plain copies go to 64 MiB of
private memory in turn, and come from a random place of a private array as large as L2.
"""

from __future__ import annotations

import time

import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.messages import L2
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.temp_client import TempClient

from .tools import Bench

MIB = 1 << 20
PAGE = 64 << 10
PAGES = 4096
TAKE = 256


def _copy_in(bench: Bench, client: MemoryManagerClient) -> None:
    temp = TempClient(client, populate=True)
    source = np.full(4 * MIB, 7, np.uint32)
    private = np.full(16 * MIB, 1, np.uint32)
    for _ in range(bench.rounds(24)):
        worst = 2.0
        for size in (MIB, 16 * MIB):
            part = source[: size // 4]
            targets = private.reshape(-1, size // 4)
            plain, put = [], []
            for turn in range(64 if size == MIB else 8):
                began = time.perf_counter()
                np.copyto(targets[turn % len(targets)], part)
                plain.append(time.perf_counter() - began)
                began = time.perf_counter()
                ref = temp.put(part)
                put.append(time.perf_counter() - began)
                temp.adopt(ref).release()
            ratio = float(np.median(plain) / np.median(put))
            bench.add(f"copyin_{size >> 20}MiB_ratio", ratio)
            worst = min(worst, ratio)
        bench.add("copyin_ratio_to_memcpy", worst)


def _gather(bench: Bench, client: MemoryManagerClient) -> None:
    arena = client.arena("kv/l2")
    writer = client.arena("kv/l2", write=True)
    writer.array[:] = 3
    source = np.full((PAGES, PAGE), 5, np.uint8)
    out, target = np.full((TAKE, PAGE), 1, np.uint8), np.full((TAKE, PAGE), 1, np.uint8)
    rng = np.random.default_rng(3)
    for _ in range(bench.rounds(60)):
        slots = rng.permutation(PAGES)[:TAKE].astype(np.uint32)
        at = int(rng.integers(PAGES - TAKE))
        began = time.perf_counter()
        np.copyto(target, source[at : at + TAKE])
        plain = time.perf_counter() - began
        began = time.perf_counter()
        arena.gather(PAGE, slots, out)
        bench.add("gather_ratio_to_memcpy", plain / (time.perf_counter() - began))
        assert out[0, 0] == 3


def measure(bench: Bench) -> None:
    """Both, in this process, on one core."""
    pool = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=1, l2_pages=PAGES)
    with bench.manager(pools=(pool,), temp_bytes=512 * MIB) as (pid, path):
        first, last = bench.cores[0], bench.cores[-1]
        with MemoryManagerClient(path) as client, bench.pinned(first, last, pid):
            client.arena("kv/l2").populate()
            _copy_in(bench, client)
            assert client.welcome.pools[0].l2_pages == PAGES, L2
            _gather(bench, client)
