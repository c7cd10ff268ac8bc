"""Movers that die, stall or lie: what their jobs held comes back, and not before it is safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import BadToken, Refused
from omni_flow.data.messages import L2, L3, JobDone, L3Change, TierState
from omni_flow.data.protocol import Op

from .conftest import Make, Manager, keys
from .movers_rig import DEEP, PAGE, SPEC, FakeDisk, fill, right_bytes, wait_for_mover


def test_a_killed_mover_is_started_again_and_loses_no_slot(manager: Make) -> None:
    server = manager(pools=(SPEC,), movers=(("copy",),))
    with server.client() as client:
        wait_for_mover(client)
        for _ in range(3):
            pid = next(row["pid"] for row in client.inspect() if row["role"] == "mover")
            os.kill(pid, signal.SIGKILL)
            names = keys(150)
            fill(client, names)
            wait_for_mover(client)
            right_bytes(client, names)
            assert client.check() == []


def test_a_disk_that_dies_takes_its_copies_along(disk: tuple[Manager, FakeDisk]) -> None:
    server, fake = disk
    with server.client() as client:
        names = keys(200)
        fill(client, names, 4)
        fake.sick = "silent"
        fake.close()
        server.settle()
        assert not (client.probe("kv", names) & L3).any()
        assert client.stats()["pool_l3_pages/kv"] == 0
        assert client.stats()["pool_jobs_running/kv"] == 0
        assert client.check() == []


def test_only_movers_report_jobs_and_only_their_own(disk: tuple[Manager, FakeDisk]) -> None:
    server, _ = disk
    with server.client() as client:
        with pytest.raises(Refused):
            client.call(Op.JOB_DONE, JobDone(1), (np.ones(1, np.uint8),))
        with pytest.raises(Refused):
            client.call(Op.TIER_STATE, TierState("kv", L3, False))
        with pytest.raises(BadToken):
            MemoryManagerClient(server.path, role="mover", kinds=("push",)).call(
                Op.JOB_DONE, JobDone(1), (np.ones(1, np.uint8),)
            )


STALLED_MOVER = """
import sys
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.messages import L3, TierState
from omni_flow.data.protocol import Op
jobs = []
client = MemoryManagerClient(sys.argv[1], role="mover", name="stalled", kinds=("store", "load"))
client.on_event = lambda message: jobs.append(message.own())
client.call(Op.TIER_STATE, TierState("kv", L3, True))
pages = client.arena("kv/l2", write=True).pages(64, 32)
print("ready", flush=True)
while not jobs:
    client.wait_end(0.01)
client.close()
slots = jobs[0].columns[2]
print(*slots.tolist(), flush=True)
sys.stdin.readline()
pages[slots] = 0xEE
print("written", flush=True)
sys.stdin.readline()
"""


def test_targets_of_a_lost_mover_are_not_used_again_while_its_process_lives(manager: Make) -> None:
    server = manager(pools=(DEEP,))
    command = [sys.executable, "-c", STALLED_MOVER, server.path]
    with (
        server.client() as client,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mover,
    ):
        assert mover.stdin is not None
        assert mover.stdout is not None
        assert mover.stdout.readline() == "ready\n"
        disk = MemoryManagerClient(server.path, role="mover", name="teller", kinds=("push",))
        names, places = keys(2), np.arange(1, 3, dtype=np.uint64)
        disk.call(Op.L3_CHANGE, L3Change("kv", "recovered"), (names, places, places))
        assert client.fetch("kv", names, tier=L2).tolist() == [0, 0]
        held = {int(slot) for slot in mover.stdout.readline().split()}
        assert len(held) == 2
        assert client.stats()["pool_jobs_orphaned/kv"] == 1

        def take_all() -> tuple[int, np.ndarray]:
            room = client.reserve("kv", client.welcome.pools[0].l2_pages, least=1, tier=L2)
            return room.token, room.slots

        token, slots = take_all()
        assert not held & set(slots.tolist())
        arena = client.arena("kv/l2", write=True).pages(PAGE, 32)
        arena[slots] = 7
        mover.stdin.write("write\n")
        mover.stdin.flush()
        assert mover.stdout.readline() == "written\n"
        assert (arena[slots] == 7).all()
        client.abort("kv", token)
        assert client.check() == []

        mover.kill()
        mover.wait()
        while client.stats()["pool_jobs_orphaned/kv"]:
            client.wait_end(0.01)
        assert held & set(take_all()[1].tolist())
        disk.close()


@pytest.mark.long
def test_a_mover_that_ignores_the_end_of_its_job_is_replaced(manager: Make) -> None:
    def pid_of_mover() -> int:
        return next((row["pid"] for row in client.inspect() if row["role"] == "mover"), 0)

    with manager(pools=(SPEC,), movers=(("copy",),)).client() as client:
        wait_for_mover(client)
        stopped = pid_of_mover()
        os.kill(stopped, signal.SIGSTOP)
        fill(client, keys(100))
        while pid_of_mover() in (0, stopped):
            assert not client.wait_end(0.2)
        while client.stats()["pool_jobs_orphaned/kv"]:
            assert not client.wait_end(0.01)
        while not client.stats()["pool_demoted/kv"]:
            fill(client, keys(20))
        names = keys(100)
        fill(client, names)
        assert right_bytes(client, names) == 100
        assert client.stats()["job_movers_lost"] == 1
