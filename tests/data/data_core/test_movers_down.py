"""Pages on their way down: demotion with real mover processes, and with disks that misbehave."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_flow.data.errors import JobFailed, NoMover, PoolFull
from omni_flow.data.messages import L1, L2

from .conftest import Make, Manager, keys
from .movers_rig import PAGE, SPEC, FakeDisk, WillingMover, fill, right_bytes, wait_for_mover


def test_pages_go_down_instead_of_away_and_come_back_right(manager: Make) -> None:
    with manager(pools=(SPEC,), movers=(("copy",),)).client() as client:
        wait_for_mover(client)
        names = keys(200)
        fill(client, names)
        assert right_bytes(client, names) == 200
        assert client.fetch("kv", names[:16]).all()
        assert (client.probe("kv", names[:16]) & L1).all()
        assert right_bytes(client, names) == 200
        assert client.fetch("kv", keys(3)).tolist() == [0, 0, 0]


def test_an_engine_with_a_quota_sends_pages_down_too_when_it_can_wait(manager: Make) -> None:
    server = manager(pools=(SPEC,), movers=(("copy",),))
    with server.client(role="engine", quotas={"kv": 16}) as engine:
        wait_for_mover(engine)
        names = keys(200)
        fill(engine, names)
        assert right_bytes(engine, names) == 200
        stats = engine.stats()
        assert stats["pool_evicted/kv"] == stats["pool_demoted/kv"] >= 200 - 64


@pytest.mark.parametrize("timeout", [0.0, 0.3])
def test_a_quota_is_met_in_time_by_dropping_pages_when_nothing_goes_down(timeout: float, manager: Make) -> None:
    server = manager(pools=(SPEC,), movers=(("copy",),))
    with server.client(role="engine", quotas={"kv": 32}) as engine, server.client() as other:
        wait_for_mover(engine)
        mover = next(row["pid"] for row in engine.inspect() if row["role"] == "mover")
        os.kill(mover, signal.SIGSTOP)
        names = keys(64 - 4 - 32)
        fill(other, names, batch=len(names))
        kept = other.lookup("kv", names[:8])
        held = other.reserve("kv", 32 - 4 - 8, timeout=1)
        room = engine.reserve("kv", 32, timeout=timeout)
        assert len(room.slots) == 32
        assert engine.check() == []
        os.kill(mover, signal.SIGCONT)
        other.unpin("kv", kept.lease)
        other.abort("kv", held.token)


def test_nobody_without_a_quota_stands_in_front_of_one_who_has_one(manager: Make) -> None:
    server = manager(pools=(SPEC,), movers=(("copy",),))
    with server.client(role="engine", quotas={"kv": 32}) as engine, server.client() as other:
        wait_for_mover(engine)
        shared = 64 - 4 - 32
        held = other.reserve("kv", shared)
        with server.client(name="waits") as waiting, ThreadPoolExecutor(1) as thread:
            late = thread.submit(waiting.reserve, "kv", 1, timeout=30)
            while not engine.stats()["pool_waits/kv"]:
                engine.ping()
            fill(engine, keys(64), batch=16)
            assert not late.done()
            other.abort("kv", held.token)
            assert len(late.result().slots) == 1


def test_fetching_into_the_second_tier_brings_a_copy_down(manager: Make) -> None:
    with manager(pools=(SPEC,), movers=(("copy",),)).client() as client:
        wait_for_mover(client)
        names = keys(24)
        fill(client, names)
        assert client.probe("kv", names).tolist() == [L1] * 24
        assert client.fetch("kv", names[:20], tier=L2).all()
        assert client.probe("kv", names).tolist() == [L1 | L2] * 20 + [L1] * 4
        below = client.lookup("kv", names[:20], tiers=L2)
        pages = client.arena("kv/l2").pages(PAGE, SPEC.l2_pages)
        assert (pages[below.slots] == names[:20, :1]).all()
        client.unpin("kv", below.lease)


def test_without_a_mover_nothing_is_said_to_have_come_down(manager: Make) -> None:
    with manager(pools=(SPEC,)).client() as client:
        names = keys(4)
        fill(client, names)
        with pytest.raises(NoMover):
            client.fetch("kv", names, tier=L2)


def test_without_a_mover_pages_are_dropped_and_fetching_says_so(manager: Make) -> None:
    with manager(pools=(SPEC,)).client() as client:
        names = keys(200)
        fill(client, names)
        assert right_bytes(client, names) == 64
        with pytest.raises(NoMover):
            client.pull("kv", names[:1], "elsewhere")


def test_what_is_asked_for_while_a_mover_comes_up_waits_for_it(manager: Make) -> None:
    with manager(pools=(SPEC,), movers=(("copy",),)).client() as client:
        names = keys(24)
        fill(client, names)
        assert client.fetch("kv", names, tier=L2).all()


def test_what_is_asked_for_while_a_dead_mover_is_replaced_waits_for_the_next(manager: Make) -> None:
    server = manager(pools=(SPEC,), movers=(("copy",),))
    with server.client() as client:
        names = keys(40)
        fill(client, names)
        for at in range(0, 40, 10):
            wait_for_mover(client)
            os.kill(next(row["pid"] for row in client.inspect() if row["role"] == "mover"), signal.SIGKILL)
            while client.stats()["job_movers"]:
                client.ping()
            assert client.fetch("kv", names[at : at + 10], tier=L2).all()


def test_a_mover_that_nobody_starts_again_is_not_waited_for(manager: Make) -> None:
    server = manager(pools=(SPEC,))
    with server.client() as client:
        names = keys(4)
        fill(client, names)
        with WillingMover(server.path, "copy"):
            assert client.fetch("kv", names[:1], tier=L2).all()
        server.settle()
        with pytest.raises(NoMover):
            client.fetch("kv", names, tier=L2)


MUTE = ("{python}", "-c", "import time; time.sleep(600)", "omni_flow.data.mover")


def test_a_mover_that_does_not_come_up_is_waited_for_until_the_deadline(manager: Make) -> None:
    with manager(pools=(SPEC,), movers=(MUTE,)).client() as client:
        names = keys(4)
        fill(client, names)
        with pytest.raises(JobFailed, match="not done in time"):
            client.fetch("kv", names, tier=L2, timeout=0.2)


@pytest.mark.long
def test_a_mover_that_does_not_come_up_is_waited_for_so_long_and_no_longer(manager: Make) -> None:
    with manager(pools=(SPEC,), movers=(MUTE,)).client() as client:
        names = keys(4)
        fill(client, names)
        with pytest.raises(NoMover):
            client.fetch("kv", names, tier=L2, timeout=600)


def test_a_failing_disk_stops_nobody(disk: tuple[Manager, FakeDisk]) -> None:
    server, fake = disk
    fake.sick = "failing"
    with server.client() as client:
        fill(client, keys(200), 4)
        assert client.check() == []


def test_at_full_occupancy_every_wait_ends(disk: tuple[Manager, FakeDisk]) -> None:
    server, _ = disk
    with server.client() as holder, server.client() as client:
        names = keys(12)
        fill(holder, names)
        pins = holder.lookup("kv", names)
        for _ in range(40):
            with pytest.raises(PoolFull) as full:
                client.reserve("kv", 8, timeout=0.05)
            assert full.value.holders
        holder.unpin("kv", pins.lease)
        fill(client, keys(40), 8)
        assert client.check() == []
