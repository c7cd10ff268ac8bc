"""A real server against a dictionary: bytes, pins and accounting, whatever clients do and whenever they die."""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import BadToken, PoolFull
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

from .conftest import Manager

PAGES = 24
UNIVERSE = np.random.default_rng(11).integers(0, 256, (60, 32), np.uint8)


class Pages(RuleBasedStateMachine):
    """Three clients, 24 pages, 60 keys. The oracle: per client its reservations and leases, per key its bytes."""

    server: ClassVar[Manager | None] = None
    folder: ClassVar[tempfile.TemporaryDirectory[str] | None] = None

    @classmethod
    def shared(cls) -> Manager:
        if cls.server is None:
            cls.folder = tempfile.TemporaryDirectory(prefix="omni")
            spec = PoolSpec(name="kv", page_bytes=64, l1_pages=PAGES, policy="lru")
            cls.server = Manager(ServerConfig(path=f"{cls.folder.name}/m.sock", pools=(spec,), huge=False))
        return cls.server

    @initialize()
    def begin(self) -> None:
        server = self.shared()
        server.settle()
        self.clients: list[MemoryManagerClient] = [server.client(name=str(i)) for i in range(3)]
        self.rooms: list[dict[int, Any]] = [{}, {}, {}]
        self.leases: list[dict[int, list[int]]] = [{}, {}, {}]
        self.written: dict[int, int] = {}
        self.stamp = 0
        self.pages = self.clients[0].arena("kv/l1", write=True).pages(64, PAGES)
        self.clients[0].drop("kv", UNIVERSE)

    def held(self) -> int:
        """Slots that cannot be evicted: reserved ones and those of distinct pinned keys."""
        reserved = sum(len(left) for rooms in self.rooms for _, left in rooms.values())
        pinned = {key for leases in self.leases for keys in leases.values() for key in keys}
        return reserved + len(pinned)

    @rule(who=st.integers(0, 2), n=st.integers(1, 10))
    def reserve(self, who: int, n: int) -> None:
        held = self.held()
        try:
            room = self.clients[who].reserve("kv", n)
        except PoolFull:
            assert held + n > PAGES
            return
        assert held + n <= PAGES
        self.rooms[who][room.token] = (room.slots, list(range(n)))

    @precondition(lambda self: any(self.rooms))
    @rule(who=st.integers(0, 2), data=st.data(), pin=st.booleans())
    def commit(self, who: int, data: st.DataObject, pin: bool) -> None:
        if not self.rooms[who]:
            return
        token = data.draw(st.sampled_from(sorted(self.rooms[who])))
        slots, left = self.rooms[who][token]
        at = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        names = data.draw(st.lists(st.integers(0, 59), min_size=len(at), max_size=len(at)))
        stamps = {}
        for position in at:
            self.stamp += 1
            self.pages[slots[position]] = self.stamp & 0xFF
            stamps[position] = self.stamp & 0xFF
        stored = self.clients[who].commit("kv", token, UNIVERSE[names], positions=at, pin=pin)
        fresh: set[int] = set()
        for i, (position, name) in enumerate(zip(at, names, strict=True)):
            if stored.status[i] == 0:
                self.written[name] = stamps[position]
                fresh.add(name)
                assert stored.slots[i] == slots[position]
            else:
                assert name in self.written
        if pin:
            self.leases[who][stored.lease] = sorted(set(names))
        remaining = [position for position in left if position not in at]
        if remaining:
            self.rooms[who][token] = (slots, remaining)
        else:
            del self.rooms[who][token]

    @precondition(lambda self: any(self.rooms))
    @rule(who=st.integers(0, 2), data=st.data())
    def abort(self, who: int, data: st.DataObject) -> None:
        if not self.rooms[who]:
            return
        token = data.draw(st.sampled_from(sorted(self.rooms[who])))
        self.clients[who].abort("kv", token)
        del self.rooms[who][token]
        for other in self.clients:
            try:
                other.abort("kv", token)
            except BadToken:
                continue
            raise AssertionError("a token was worth something twice")

    @rule(who=st.integers(0, 2), names=st.lists(st.integers(0, 59), min_size=1, max_size=8))
    def lookup(self, who: int, names: list[int]) -> None:
        found = self.clients[who].lookup("kv", UNIVERSE[names])
        for i in range(found.pages):
            assert (self.pages[found.slots[i]] == self.written[names[i]]).all()
        if found.pages < len(names):
            assert not any(names[found.pages] in keys for leases in self.leases for keys in leases.values())
        if found.lease:
            self.leases[who][found.lease] = sorted(set(names[: found.pages]))

    @precondition(lambda self: any(self.leases))
    @rule(who=st.integers(0, 2), data=st.data())
    def unpin(self, who: int, data: st.DataObject) -> None:
        if self.leases[who]:
            lease = data.draw(st.sampled_from(sorted(self.leases[who])))
            self.clients[who].unpin("kv", lease)
            del self.leases[who][lease]

    @rule(who=st.integers(0, 2))
    def die(self, who: int) -> None:
        self.clients[who].close()
        self.rooms[who], self.leases[who] = {}, {}
        self.shared().settle()
        self.clients[who] = self.shared().client(name=str(who))

    @invariant()
    def pinned_pages_stay_and_the_books_are_right(self) -> None:
        if not hasattr(self, "clients"):
            return
        pinned = sorted({key for leases in self.leases for keys in leases.values() for key in keys})
        if pinned:
            assert self.clients[0].probe("kv", UNIVERSE[pinned]).all()
        rows = {row["name"]: row["held"]["kv"] for row in self.clients[0].inspect()}
        for who in range(3):
            reserved = sum(len(left) for _, left in self.rooms[who].values())
            assert rows[str(who)] == [reserved, sum(map(len, self.leases[who].values()))]
        assert self.clients[0].check() == []

    def teardown(self) -> None:
        for client in getattr(self, "clients", []):
            client.close()


def with_settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def close_shared(machine: Any) -> None:
    """End the server that all examples of a machine have used; it must have met no error of its own."""
    server, machine.server = machine.server, None
    with server.client(role="viewer") as client:
        assert client.stats()["internal_errors"] == 0, server.log
    server.close()
    machine.folder.cleanup()


class TestPages(Pages.TestCase):
    """Runs the machine; one server serves all its examples."""

    settings = with_settings(25, 40)

    @classmethod
    def teardown_class(cls) -> None:
        close_shared(Pages)


@pytest.mark.long
class TestPagesAtLength(TestPages):
    """The same with many more examples."""

    settings = with_settings(600, 80)
