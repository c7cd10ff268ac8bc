"""Demotion, promotion and jobs with real mover processes, and with movers that misbehave."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import BadToken, JobFailed, NoMover, PoolFull, Refused
from omni_flow.data.messages import L1, L2, L3, Job, JobDone, L3Change, TierState
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.protocol import Column, Message, Op
from omni_flow.data.server import ServerConfig

from .conftest import Make, Manager, keys

PAGE = 64
SPEC = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=64, l2_pages=256)
DEEP = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=16, l2_pages=32, l3_pages=1000)


def wait_for_mover(client: MemoryManagerClient) -> None:
    while not client.stats()["job_movers"]:
        client.wait_end(0.01)


def fill(client: MemoryManagerClient, names: np.ndarray, batch: int = 8) -> None:
    """Write pages whose bytes are the first byte of their key."""
    pages = client.arena("kv/l1", write=True).pages(PAGE, client.welcome.pools[0].l1_pages)
    for at in range(0, len(names), batch):
        part = names[at : at + batch]
        room = client.reserve("kv", len(part), timeout=20)
        pages[room.slots] = part[:, :1]
        client.commit("kv", room.token, part)


def right_bytes(client: MemoryManagerClient, names: np.ndarray) -> int:
    """How many of the pages are there and have the right bytes; those there with wrong ones fail."""
    info = client.welcome.pools[0]
    maps = {
        L1: client.arena("kv/l1").pages(PAGE, info.l1_pages),
        L2: client.arena("kv/l2").pages(PAGE, info.l2_pages),
    }
    there = 0
    for name in names:
        found = client.lookup("kv", name[None])
        if found.pages:
            page = maps[int(found.tiers[0])][found.slots[0]]
            assert (page == name[0]).all()
            client.unpin("kv", found.lease)
            there += 1
    return there


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


class FakeDisk:
    """A mover for L3 in this process, on a dictionary; `sick` makes it fail or fall silent."""

    def __init__(self, server: Manager) -> None:
        self.client = MemoryManagerClient(server.path, role="mover", name="disk", kinds=("store", "load", "copy"))
        self.records: dict[int, bytes] = {}
        self.sick = ""
        self.jobs: list[tuple[Job, list[Column]]] = []
        self._stop = threading.Event()
        self.client.on_event = self._event
        self.client.call(Op.TIER_STATE, TierState("kv", L3, True))
        self.arenas = {
            L1: self.client.arena("kv/l1", write=True).pages(PAGE, 16),
            L2: self.client.arena("kv/l2", write=True).pages(PAGE, 32),
        }
        self._calls: queue.SimpleQueue[tuple[L3Change, tuple[Column, ...], threading.Event]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _event(self, message: Message) -> None:
        if message.op == Op.JOB:
            own = message.own()
            self.jobs.append((own.body(Job), own.columns))

    def _run(self) -> None:
        while not self._stop.is_set():
            self.client.wait_end(0.01)
            while not self._calls.empty():
                body, columns, done = self._calls.get()
                self.client.call(Op.L3_CHANGE, body, columns)
                done.set()
            while self.jobs and self.sick != "silent":
                self._one(*self.jobs.pop(0))

    def _one(self, job: Job, columns: list[Column]) -> None:
        _, src, dst, places, _ = columns
        ok = np.ones(len(src), np.uint8)
        made = np.zeros(len(src), np.uint64)
        for i in range(len(src)):
            if job.kind == "copy":
                self.arenas[job.dst][dst[i]] = self.arenas[job.src][src[i]]
            elif job.kind == "store":
                made[i] = len(self.records) + 1
                self.records[int(made[i])] = self.arenas[L2][src[i]].tobytes()
            else:
                record = self.records.get(int(places[i]))
                ok[i] = record is not None and self.sick != "rotten"
                if ok[i]:
                    assert record is not None
                    self.arenas[L2][dst[i]] = np.frombuffer(record, np.uint8)
        if self.sick == "failing":
            ok[:] = 0
        self.client.call(Op.JOB_DONE, JobDone(job.id), (ok, made) if job.kind == "store" else (ok,))

    def tell(self, what: str, *columns: Column) -> None:
        """Have the mover's thread say what has changed in L3."""
        done = threading.Event()
        self._calls.put((L3Change("kv", what), columns, done))
        assert done.wait(20)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.client.close()


class WillingMover:
    """A mover of one kind that says of each job that it is done."""

    def __init__(self, path: str, kind: str = "push") -> None:
        self.jobs: list[Job] = []
        self._client = MemoryManagerClient(path, role="mover", kinds=(kind,))
        self._todo: list[tuple[Job, int]] = []
        self._client.on_event = self._event
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _event(self, message: Message) -> None:
        if message.op == Op.JOB:
            self._todo.append((message.body(Job), len(message.columns[4])))

    def _run(self) -> None:
        while not self._stop.is_set():
            self._client.wait_end(0.01)
            while self._todo:
                job, count = self._todo.pop()
                self.jobs.append(job)
                self._client.call(Op.JOB_DONE, JobDone(job.id), (np.ones(count, np.uint8),))

    def __enter__(self) -> WillingMover:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


@contextlib.contextmanager
def on_host_memory(config: ServerConfig) -> Iterator[str]:
    """A manager whose device is host memory; at its end it must be sound."""
    script = Path(__file__).parents[1] / "weights" / "device_of_host_memory.py"
    read, write = os.pipe()
    command = [sys.executable, str(script), "serve", msgspec.json.encode(config).decode(), "--ready-fd", str(write)]
    with subprocess.Popen(command, pass_fds=(write,)) as process:
        os.close(write)
        with open(read, "rb") as ready:
            assert ready.readline()
        yield config.path
        with MemoryManagerClient(config.path, role="viewer") as client:
            assert client.check() == []
            assert client.stats()["internal_errors"] == 0
        process.terminate()
        assert process.wait(20) == 0


@pytest.fixture
def disk(manager: Make) -> Iterator[tuple[Manager, FakeDisk]]:
    server = manager(pools=(DEEP,))
    fake = FakeDisk(server)
    yield server, fake
    if not fake._stop.is_set():
        fake.close()


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


def test_a_failing_disk_stops_nobody(disk: tuple[Manager, FakeDisk]) -> None:
    server, fake = disk
    fake.sick = "failing"
    with server.client() as client:
        fill(client, keys(200), 4)
        assert client.check() == []


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


def test_a_recovered_disk_is_found_again(disk: tuple[Manager, FakeDisk]) -> None:
    server, fake = disk
    with server.client() as client:
        names = keys(1200)
        places = np.arange(1, 1201, dtype=np.uint64)
        for i, name in enumerate(names):
            fake.records[i + 1] = bytes([name[0]]) * PAGE
        fake.tell("recovered", names, places, places)
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
        places = np.arange(1, 9, dtype=np.uint64)
        for i, name in enumerate(names):
            fake.records[i + 1] = bytes([name[0]]) * PAGE
        fake.tell("recovered", names, places, places)
        assert client.lookup("kv", names, prefetch=True).pages == 0
        while client.lookup("kv", names, pin=False).pages < 8:
            client.wait_end(0.01)
        assert right_bytes(client, names) == 8


def test_a_push_of_pages_that_only_the_disk_has_loads_them_first(disk: tuple[Manager, FakeDisk]) -> None:
    server, _ = disk
    with server.client() as client, WillingMover(server.path) as sent:
        names = keys(60)
        fill(client, names)
        below = names[client.probe("kv", names) == L3][:4]
        assert len(below) == 4
        assert client.push("kv", below, "elsewhere").all()
        assert {job.src for job in sent.jobs} == {L2}


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
