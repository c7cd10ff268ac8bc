"""Pages on their way up, or to other nodes: fetches, prefetches and pushes, and who is in their way."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import JobFailed
from omni_flow.data.kv_client import bring_request, per_key
from omni_flow.data.messages import L1, L2, L3
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.posting_client import PostingClient
from omni_flow.data.server_config import ServerConfig

from .conftest import Make, Manager, keys
from .movers_rig import (
    DEEP_FULL,
    FULL,
    PAGE,
    FakeDisk,
    WillingMover,
    fill,
    on_host_memory,
    right_bytes,
    wait_for_mover,
)


def test_pages_reach_the_third_tier_and_are_fetched_from_there(disk: tuple[Manager, FakeDisk]) -> None:
    server, _ = disk
    with server.client() as client:
        names = keys(300)
        fill(client, names, 4)
        tiers = client.probe("kv", names)
        assert (tiers & L3).any()
        lost = int((tiers == 0).sum())
        deep = names[tiers == L3][:8]
        assert client.fetch("kv", deep).all()
        assert right_bytes(client, deep) == 8
        assert lost == 0
        assert client.check() == []


def test_a_bad_record_is_a_miss_and_never_wrong_bytes(disk: tuple[Manager, FakeDisk]) -> None:
    server, fake = disk
    with server.client() as client:
        names = keys(200)
        fill(client, names, 4)
        deep = names[client.probe("kv", names) == L3][:8]
        fake.sick = "rotten"
        assert client.fetch("kv", deep).tolist() == [0] * len(deep)
        assert client.probe("kv", deep).tolist() == [0] * len(deep)
        assert client.stats()["pool_bad_records/kv"] == len(deep)


def test_a_silent_disk_delays_nobody_past_the_deadline(disk: tuple[Manager, FakeDisk]) -> None:
    server, fake = disk
    with server.client() as client:
        names = keys(200)
        fill(client, names, 4)
        deep = names[client.probe("kv", names) == L3][:4]
        fake.sick = "silent"
        with pytest.raises(JobFailed):
            client.fetch("kv", deep, timeout=0.3)
        for _ in range(30):
            room = client.reserve("kv", 4, timeout=0.05)
            client.commit("kv", room.token, keys(4))
        fake.sick = ""
        while client.stats()["pool_jobs_running/kv"]:
            client.wait_end(0.01)
        assert client.check() == []


def test_a_recovered_disk_is_found_again(disk: tuple[Manager, FakeDisk]) -> None:
    server, fake = disk
    with server.client() as client:
        names = keys(1200)
        places = fake.recover(names)
        assert client.stats()["pool_l3_pages/kv"] == 1000
        assert client.fetch("kv", names[:8], tier=L2).all()
        assert right_bytes(client, names[:8]) == 8
        fake.tell("moved", names[8:9], places[8:9], places[9:10] + 7000)
        fake.tell("dropped", names[8:10], places[8:10], places[8:10])
        assert client.probe("kv", names[8:10]).tolist() == [L3, 0]


def test_a_lookup_starts_the_prefetch_of_what_follows(disk: tuple[Manager, FakeDisk]) -> None:
    server, fake = disk
    with server.client() as client:
        names = keys(8)
        fake.recover(names)
        assert client.lookup("kv", names, prefetch=True).pages == 0
        while client.lookup("kv", names, pin=False).pages < 8:
            client.wait_end(0.01)
        assert right_bytes(client, names) == 8


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_pages_that_are_fetched_again_and_again_outlive_those_that_nobody_asks_for(policy: str, manager: Make) -> None:
    spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=16, staging=2, policy=policy)
    with manager(pools=(spec,)).client() as client:
        names = keys(14)
        fill(client, names, 14)
        for _ in range(3):
            assert client.fetch("kv", names[10:]).all()
        fill(client, keys(6), 6)
        assert client.probe("kv", names[10:]).tolist() == [L1] * 4


def test_the_copy_that_a_fetch_reads_from_counts_as_used(manager: Make) -> None:
    spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=8, l2_pages=8, staging=2, policy="lru", demote=False)
    with manager(pools=(spec,), movers=(("copy",),)).client() as client:
        wait_for_mover(client)
        names = keys(6)
        fill(client, names, 6)
        assert client.fetch("kv", names, tier=L2).all()
        fill(client, keys(12), 6)
        assert client.probe("kv", names[:2]).tolist() == [L2] * 2
        assert client.fetch("kv", names[:2]).all()
        assert len(client.reserve("kv", 4, tier=L2).slots) == 4
        assert client.probe("kv", names[:2]).tolist() == [L1 | L2] * 2


def test_a_push_of_pages_that_only_the_disk_has_loads_them_first(disk: tuple[Manager, FakeDisk]) -> None:
    server, _ = disk
    with server.client() as client, WillingMover(server.path) as sent:
        names = keys(60)
        fill(client, names)
        below = names[client.probe("kv", names) == L3][:4]
        assert len(below) == 4
        assert client.push("kv", below, "elsewhere").all()
        assert {job.src for job in sent.jobs} == {L2}


def test_a_push_of_more_than_fits_above_the_disk_gets_to_its_end(disk: tuple[Manager, FakeDisk]) -> None:
    server, _ = disk
    with server.client() as client, WillingMover(server.path) as sent:
        names = keys(200)
        fill(client, names, 4)
        assert (client.probe("kv", names) == L3).sum() > server.config.pools[0].l2_pages
        assert client.push("kv", names, "elsewhere", timeout=20).all()
        assert {job.src for job in sent.jobs} == {L1, L2}
        assert client.check() == []


def test_a_push_of_pages_that_lie_on_a_device_brings_them_down_first(tmp_path: Path) -> None:
    spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=16, l2_pages=32, l1_device=0)
    with (
        on_host_memory(ServerConfig(path=str(tmp_path / "m.sock"), pools=(spec,))) as path,
        MemoryManagerClient(path) as client,
        WillingMover(path) as sent,
        WillingMover(path, "cuda-copy") as copied,
    ):
        names = keys(6)
        client.commit("kv", client.reserve("kv", 6).token, names)
        assert client.push("kv", names, "elsewhere").all()
        assert {(job.src, job.dst) for job in copied.jobs} == {(L1, L2)}
        assert {job.src for job in sent.jobs} == {L2}
        assert client.probe("kv", names).tolist() == [L1 | L2] * 6


def test_pages_in_the_way_of_a_fetch_go_down(manager: Make) -> None:
    with manager(pools=(FULL,), movers=(("copy",),)).client() as client:
        wait_for_mover(client)
        names = keys(160)
        fill(client, names)
        while client.stats()["pool_jobs_running/kv"]:
            client.wait_end(0.01)
        below = names[client.probe("kv", names) == L2]
        assert len(below) >= 160 - FULL.l1_pages
        assert client.fetch("kv", below, timeout=10).all()
        assert right_bytes(client, names) == 160


def test_room_for_one_job_may_be_that_of_pages_the_next_was_to_read(manager: Make) -> None:
    spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=400, l2_pages=400, staging=300, high=1.0, low=1.0)
    with manager(pools=(spec,), movers=(("copy",),)).client() as client:
        wait_for_mover(client)
        names = keys(1000)
        fill(client, names)
        while client.stats()["pool_jobs_running/kv"]:
            client.wait_end(0.01)
        below = names[client.probe("kv", names) == L2]
        assert len(below) == spec.l2_pages  # all that L2 has, so what goes down takes the place of some
        came = client.fetch("kv", below, timeout=20)
        assert 0 < came.sum() < len(below)
        assert right_bytes(client, below[came == 1]) > 0
        assert client.check() == []


def test_pages_in_the_way_of_what_comes_from_the_disk_go_there(manager: Make) -> None:
    server = manager(pools=(DEEP_FULL,))
    with contextlib.closing(FakeDisk(server.path)) as disk, server.client() as client:
        names, places = keys(40), np.arange(7001, 7041, dtype=np.uint64)
        for place, name in zip(places.tolist(), names, strict=True):
            disk.records[place] = bytes([name[0]]) * PAGE
        disk.tell("recovered", names, places, places)
        others = keys(40)
        fill(client, others, 4)
        assert client.fetch("kv", names[:24], tier=L2, timeout=10).all()
        assert right_bytes(client, names[:24]) == 24
        assert (client.probe("kv", others) != 0).all()
        assert client.check() == []


@pytest.mark.parametrize("part", [300, 100], ids=["at-once", "in-parts"])
def test_what_is_fetched_through_l2_pushes_nothing_to_the_disk_and_what_lay_there_goes_down_later(
    manager: Make, part: int
) -> None:
    spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=400, l2_pages=256, l3_pages=1000, policy="lru")
    server = manager(pools=(spec,))
    with contextlib.closing(FakeDisk(server.path)) as disk, server.client() as client:
        others, names = keys(190), keys(300)
        client.commit("kv", client.reserve("kv", 190, tier=L2).token, others)
        disk.recover(names)
        with contextlib.closing(PostingClient(server.path)) as asker:
            parts = [bring_request("fetch", "kv", names[at : at + part], "", L1, 20.0) for at in range(0, 300, part)]
            assert all(came().all() for came in [asker.post(request, per_key) for request in parts])
        assert "store" not in disk.kinds[: len(disk.kinds) - disk.kinds[::-1].index("load")]
        assert right_bytes(client, names) == 300
        while "store" not in disk.kinds:  # the manager hears nothing meanwhile
            client.wait_end(0.01)
        while client.stats()["pool_l2_free/kv"] < 256 * (1 - spec.high):
            client.wait_end(0.01)
        assert (client.probe("kv", others) != 0).all()
        assert client.check() == []


def test_a_staging_share_of_one_page_is_enough_for_what_comes_from_the_disk_into_a_full_l2(manager: Make) -> None:
    spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=16, l2_pages=8, l3_pages=100, staging=1, high=1.0, low=1.0)
    server = manager(pools=(spec,))
    with contextlib.closing(FakeDisk(server.path)) as disk, server.client() as client:
        for others in (keys(4), keys(4)):
            client.commit("kv", client.reserve("kv", 4, tier=L2).token, others)
        assert client.stats()["pool_l2_free/kv"] == 0
        names = keys(5)
        disk.recover(names)
        assert client.fetch("kv", names, timeout=5).all()
        assert right_bytes(client, names) == 5


def test_who_fetches_without_end_does_not_keep_pages_from_going_down(manager: Make) -> None:
    spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=64, l2_pages=256, l3_pages=1000, high=0.5, low=0.4)
    server = manager(pools=(spec,))
    with contextlib.closing(FakeDisk(server.path)) as disk, server.client() as client, server.client() as other:
        names = keys(8)
        disk.recover(names)
        disk.sick = "silent"
        fetching = threading.Thread(target=client.fetch, args=("kv", names))
        fetching.start()
        while not other.overview()["fetches"]:
            other.wait_end(0.01)
        other.commit("kv", other.reserve("kv", 150, tier=L2).token, keys(150))
        while not any(job.kind == "store" for job, _ in list(disk.jobs)):  # the manager hears nothing meanwhile
            assert fetching.is_alive()
            other.wait_end(0.01)
        disk.sick = ""
        fetching.join(20)
        assert not fetching.is_alive()


def test_pages_in_the_way_of_what_comes_from_another_node_go_down(manager: Make) -> None:
    server = manager(pools=(DEEP_FULL,))
    with (
        contextlib.closing(FakeDisk(server.path)),
        server.client() as client,
        WillingMover(server.path, "pull") as pulled,
    ):
        others = keys(40)
        fill(client, others, 4)
        assert client.pull("kv", keys(24), "elsewhere", timeout=10).all()
        assert pulled.jobs
        assert (client.probe("kv", others) != 0).all()
        assert client.check() == []
