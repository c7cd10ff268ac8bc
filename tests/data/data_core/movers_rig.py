"""What the tests of movers share: pools with tiers, pages that show their key, movers that do as they are told."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.messages import L1, L2, L3, Job, JobDone, L3Change, TierState
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.protocol import Column, Message, Op
from omni_flow.data.server_config import ServerConfig

STAND_IN = Path(__file__).parents[1] / "weights" / "device_of_host_memory.py"
PAGE = 64
SPEC = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=64, l2_pages=256)
DEEP = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=16, l2_pages=32, l3_pages=1000)
FULL, DEEP_FULL = (msgspec.structs.replace(spec, high=1.0, low=1.0) for spec in (SPEC, DEEP))
"""Those, without anything that goes down before room is needed."""


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


class FakeDisk:
    """A mover for L3 in this process, on a dictionary; `sick` makes it fail or fall silent."""

    def __init__(self, path: str) -> None:
        self.client = MemoryManagerClient(path, role="mover", name="disk", kinds=("store", "load", "copy"))
        self.records: dict[int, bytes] = {}
        self.sick = ""
        self.jobs: list[tuple[Job, list[Column]]] = []
        self.kinds: list[str] = []
        self._stop = threading.Event()
        self.client.on_event = self._event
        self.client.call(Op.TIER_STATE, TierState("kv", L3, True))
        info = self.client.welcome.pools[0]
        self.arenas = {
            L1: self.client.arena("kv/l1", write=True).pages(PAGE, info.l1_pages),
            L2: self.client.arena("kv/l2", write=True).pages(PAGE, info.l2_pages),
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
        self.kinds.append(job.kind)
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

    def recover(self, names: np.ndarray) -> np.ndarray:
        """Say that records of these keys were found, with the bytes that `fill` would write. Returns their places."""
        places = np.arange(1, len(names) + 1, dtype=np.uint64)
        self.records |= {int(place): bytes([name[0]]) * PAGE for place, name in zip(places, names, strict=True)}
        self.tell("recovered", names, places, places)
        return places

    def close(self) -> None:
        """Its process would end; once."""
        if self._stop.is_set():
            return
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
    read, write = os.pipe()
    command = [sys.executable, str(STAND_IN), "serve", msgspec.json.encode(config).decode(), "--ready-fd", str(write)]
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
