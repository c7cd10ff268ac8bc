"""The mover between an L1 on a device and L2, over a device made of host memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.messages import L1, L2
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

from .conftest import keys
from .movers_rig import STAND_IN, on_host_memory, wait_for_mover

PLANES, PIECE, PAGES = 3, 64, 65


def contents(names: np.ndarray) -> np.ndarray:
    """The bytes of pages, other ones in each plane: (pages, planes, piece)."""
    seeds = names.astype(np.int64)[:, :8] @ (256 ** np.arange(8))
    return np.stack([np.random.default_rng(int(s) & (1 << 63) - 1).bytes(PLANES * PIECE) for s in seeds]).view(
        np.uint8
    ).reshape(len(names), PLANES, PIECE)  # fmt: skip


def test_pages_go_down_and_come_up_whole_by_both_lanes(tmp_path: Path) -> None:
    spec = PoolSpec(
        name="kv", page_bytes=PLANES * PIECE, l1_pages=PAGES, l2_pages=512, l1_device=0, planes=PLANES, padding=1
    )
    mover = ("{python}", str(STAND_IN), "mover", "{path}")
    config = ServerConfig(path=str(tmp_path / "m.sock"), pools=(spec,), movers=(mover,))
    with on_host_memory(config) as path, MemoryManagerClient(path, name="test") as client:
        wait_for_mover(client)
        _, descriptor = client.descriptor("kv/l1", write=True)
        device = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)[: PLANES * PAGES * PIECE]
        os.close(descriptor)
        layers = device.reshape(PLANES, PAGES, PIECE)
        names = keys(300)
        bytes_of = contents(names)
        for at in range(0, len(names), 8):
            part = slice(at, at + 8)
            room = client.reserve("kv", len(names[part]), timeout=20)
            layers[:, room.slots] = bytes_of[part].swapaxes(0, 1)
            client.commit("kv", room.token, names[part])
        assert (client.probe("kv", names) != 0).all()
        order, read = np.random.default_rng(1).permutation(len(names)), 0
        for at in range(0, len(names), 20):
            some = order[at : at + 20]
            assert client.fetch("kv", names[some], tier=L1, timeout=20).all()
            for number in some.tolist():
                found = client.lookup("kv", names[number : number + 1], tiers=L1)
                if not found.pages:
                    continue  # gone down again to make room
                assert np.array_equal(layers[:, found.slots[0]], bytes_of[number])
                read += 1
                client.unpin("kv", found.lease)
        assert read > len(names) // 2
        below = client.arena("kv/l2").pages(spec.page_bytes, spec.l2_pages)
        there = names[(client.probe("kv", names) & L2) != 0]
        assert len(there) > PAGES
        for name in there[:100]:
            found = client.lookup("kv", name[None], tiers=L2)
            number = int(np.flatnonzero((names == name).all(axis=1))[0])
            assert np.array_equal(below[int(found.slots[0])], bytes_of[number].reshape(-1))
            client.unpin("kv", found.lease)
