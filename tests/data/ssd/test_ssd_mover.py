"""The SSD mover as a process beside a real memory manager: pages go down to disk, come back, and survive restarts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

import numpy as np
import pytest
from ssd_node import CAP, PAGE, fill, names, node, right, when_on

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.messages import L3
from omni_flow.data.pool_spec import PoolSpec


def test_pages_that_fit_neither_l1_nor_l2_come_back_from_disk_with_their_bytes(folder: Path, tmp_path: Path) -> None:
    with node(folder, tmp_path) as path, MemoryManagerClient(path) as client:
        when_on(client)
        keys = names(200, 1)
        fill(client, keys)
        on_disk = int(np.count_nonzero(client.probe("kv", keys) & L3))
        assert on_disk > 100
        assert right(client, keys) >= on_disk
        assert client.check() == []


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_what_is_on_disk_survives_the_end_of_the_manager(folder: Path, tmp_path: Path, stop: int) -> None:
    keys = names(200, 2)
    with node(folder, tmp_path, stop=stop) as path, MemoryManagerClient(path) as client:
        when_on(client)
        fill(client, keys)
        before = np.flatnonzero(client.probe("kv", keys) & L3)
        mover = next(row["pid"] for row in client.inspect() if row["name"] == "ssd mover")
    # The mover ends with the connection to its manager, and gives the directory back.
    with contextlib.suppress(ProcessLookupError):
        gone = os.pidfd_open(mover)
        assert select.select([gone], [], [], 20)[0]
        os.close(gone)
    with node(folder, tmp_path) as path, MemoryManagerClient(path) as client:
        when_on(client)
        after = np.flatnonzero(client.probe("kv", keys) & L3)
        assert set(before.tolist()) <= set(after.tolist())
        assert len(before) > 100
        assert right(client, keys[before]) == len(before)


def test_a_killed_mover_is_started_again_and_finds_its_records(folder: Path, tmp_path: Path) -> None:
    with node(folder, tmp_path) as path, MemoryManagerClient(path) as client:
        when_on(client)
        keys = names(150, 3)
        fill(client, keys)
        before = int(np.count_nonzero(client.probe("kv", keys) & L3))
        mover = next(row["pid"] for row in client.inspect() if row["name"] == "ssd mover")
        os.kill(mover, signal.SIGKILL)
        while client.stats()["pool_l3_on/kv"]:
            client.wait_end(0.01)
        when_on(client)
        assert int(np.count_nonzero(client.probe("kv", keys) & L3)) >= before
        assert right(client, keys) >= before
        assert client.check() == []


def test_records_of_another_page_size_are_foreign(folder: Path, tmp_path: Path) -> None:
    keys = names(150, 4)
    with node(folder, tmp_path) as path, MemoryManagerClient(path) as client:
        when_on(client)
        fill(client, keys)
    other = PoolSpec(name="kv", page_bytes=2 * PAGE, l1_pages=16, l2_pages=32, l3_pages=2000)
    with node(folder, tmp_path, pools=(other,)) as path, MemoryManagerClient(path) as client:
        when_on(client)
        assert not client.probe("kv", keys).any()


def test_a_full_disk_tier_tells_the_manager_what_it_dropped(folder: Path, tmp_path: Path) -> None:
    with node(folder, tmp_path) as path, MemoryManagerClient(path) as client:
        when_on(client)
        keys = names(1800, 5)
        fill(client, keys)
        held = np.flatnonzero(client.probe("kv", keys) & L3)
        assert len(held) * PAGE < CAP
        assert right(client, keys[held[-100:]]) == 100
        assert client.check() == []
