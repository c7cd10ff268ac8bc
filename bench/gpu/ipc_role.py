"""A client of `ipc.py`: maps the arena of pool `kv` and does what lines on stdin ask, one JSON line each.

`python ipc_role.py SOCKET write|read PAGE_BYTES`
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.device_arena import DeviceArena
from omni_flow.data.errors import DataError

RATE_BYTES = 256 << 20
RATE_TIMES = 10


def page(arena: DeviceArena, slot: int, page_bytes: int) -> torch.Tensor:
    """A page as bytes."""
    return arena.torch(slot * page_bytes, (page_bytes,), torch.uint8)


def rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """GB/s of a copy on the device, the median of some."""
    times = []
    for _ in range(RATE_TIMES + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return round(source.numel() / statistics.median(times[1:]) / 1e9, 1)


def rates(arena: DeviceArena) -> dict[str, float]:
    """Copies out of the mapping, and between two allocations of this process."""
    nbytes = min(RATE_BYTES, arena.size)
    own, other = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    shared = arena.torch(0, (nbytes,), torch.uint8)
    return {"shared_gb_per_s": rate(shared, own), "own_gb_per_s": rate(other, own)}


def answer(client: MemoryManagerClient, arena: DeviceArena, page_bytes: int, words: list[str]) -> dict[str, Any]:
    """What a line asks for."""
    match words:
        case ["store", first, count]:
            keys = np.random.default_rng(int(first)).integers(0, 256, (int(count), 32), np.uint8)
            room = client.reserve("kv", len(keys))
            for at, slot in enumerate(room.slots.tolist()):
                page(arena, slot, page_bytes).fill_(int(first) + at)
            torch.cuda.synchronize()
            client.commit("kv", room.token, keys)
            return {"keys": keys.tobytes().hex(), "slots": room.slots.tolist()}
        case ["find", first, keys]:
            named = np.frombuffer(bytes.fromhex(keys), np.uint8).reshape(-1, 32)
            found = client.lookup("kv", named)
            pages = [page(arena, slot, page_bytes) for slot in found.slots.tolist()]
            same = [bool((one == int(first) + at).all()) for at, one in enumerate(pages)]
            return {"pages": found.pages, "same": all(same)}
        case ["fill", slot, value]:
            page(arena, int(slot), page_bytes).fill_(int(value))
            torch.cuda.synchronize()
            return {"filled": int(value)}
        case ["same", slot, value]:
            return {"same": bool((page(arena, int(slot), page_bytes) == int(value)).all())}
        case ["rates"]:
            return rates(arena)
        case ["hold"]:
            return {"reserved": len(client.reserve("kv", 8).slots)}
        case ["ping"]:
            try:
                client.ping()
            except DataError as error:
                return {"error": type(error).__name__}
            return {"error": None}
        case _:
            raise ValueError(f"unknown request {words}")


def main(path: str, mode: str, page_bytes: int) -> None:
    torch.zeros(1, device="cuda")
    client = MemoryManagerClient(path, name=mode, read_only=mode == "read")
    began = time.perf_counter()
    arena = client.device_arena("kv/l1", write=mode == "write")
    ms = round((time.perf_counter() - began) * 1e3, 2)
    print(json.dumps({"kind": arena.kind, "enforced": arena.readonly_enforced, "map_ms": ms}), flush=True)
    for line in sys.stdin:
        try:
            said = answer(client, arena, page_bytes, line.split())
        except Exception as error:  # a refused write, or memory that is gone: the parent judges
            said = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
