"""TempBuffers of a real server against a dictionary: bytes and accounting, whoever publishes, adopts, forwards,
settles, releases or dies when."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_flow.data.errors import PoolFull, StaleDescriptor
from omni_flow.data.server_config import ServerConfig
from omni_flow.data.temp_client import TempClient
from omni_flow.refs import TensorRef

from .conftest import Manager
from .test_state_machine import close_shared, with_settings

CLIENTS = 3
DIRECT = (True, True, False)
"""Which clients have their slots given back directly by only readers."""
DEAD = -1
PICK = st.integers(0, 1 << 16)
"""Which of those there are, modulo their number: that depends on when clients hear that room is short, and what is
drawn may not."""


@dataclass
class Known:
    """A published buffer: who let how many readers in who have not come yet, in how many messages; who holds it."""

    ref: TensorRef
    byte: int
    expected: dict[int, int] = field(default_factory=dict)
    messages: dict[int, int] = field(default_factory=dict)
    held: list[tuple[int, Any]] = field(default_factory=list)
    uncounted: bool = False

    def given(self, who: int, readers: int) -> None:
        self.expected[who] = self.expected.get(who, 0) + readers
        self.messages[who] = self.messages.get(who, 0) + 1


class Buffers(RuleBasedStateMachine):
    """Three clients. What a dead one let in stays welcome, as `orphan_s` is long here; so a buffer of which a reader
    will never come (`uncounted`) is not given on by one who dies.
    """

    server: ClassVar[Manager | None] = None
    folder: ClassVar[tempfile.TemporaryDirectory[str] | None] = None

    @classmethod
    def shared(cls) -> Manager:
        if cls.server is None:
            cls.folder = tempfile.TemporaryDirectory(prefix="omni")
            path = f"{cls.folder.name}/m.sock"
            cls.server = Manager(
                ServerConfig(path=path, pools=(), temp_bytes=4 << 20, orphan_s=3600, huge=False, node="n")
            )
        return cls.server

    @initialize()
    def begin(self) -> None:
        self.clients = [self.shared().client(name=str(i)) for i in range(CLIENTS)]
        self.temps = [TempClient(client, direct=direct) for client, direct in zip(self.clients, DIRECT, strict=True)]
        self.known: list[Known] = []
        self.stamp = 0

    def some(self, pick: int, which: Any) -> Any:
        found = [one for one in self.known if which(one)]
        return found[pick % len(found)] if found else None

    @rule(who=st.integers(0, CLIENTS - 1), order=st.integers(0, 6), readers=st.integers(1, 3))
    def publish(self, who: int, order: int, readers: int) -> None:
        self.stamp = self.stamp % 250 + 1
        try:
            ref = self.temps[who].put(np.full(3000 << order, self.stamp, np.uint8), readers, timeout=0)
        except PoolFull:  # the arena is small, so that this happens: what the others keep unused comes back now
            for client in self.clients:
                client.ping()
            return
        known = Known(ref, self.stamp)
        known.given(who, readers)
        self.known.append(known)

    @rule(who=st.integers(0, CLIENTS - 1), pick=PICK)
    def adopt(self, who: int, pick: int) -> None:
        known = self.some(pick, lambda one: any(one.expected.values()))
        if known is not None:
            known.held.append((who, self.temps[who].adopt(known.ref)))
            giver = next(giver for giver, left in known.expected.items() if left)
            known.expected[giver] -= 1

    @rule(pick=PICK, share_pick=PICK, bell=st.booleans())
    def release(self, pick: int, share_pick: int, bell: bool) -> None:
        known = self.some(pick, lambda one: one.held)
        if known is not None:
            who, share = known.held.pop(share_pick % len(known.held))
            share.release()
            if bell:
                self.temps[who].flush()

    @rule(pick=PICK, share_pick=PICK, readers=st.integers(1, 3))
    def forward(self, pick: int, share_pick: int, readers: int) -> None:
        known = self.some(pick, lambda one: one.held)
        if known is not None:
            who, share = known.held[share_pick % len(known.held)]
            self.temps[who].forward(share, readers)
            known.given(who, readers)

    @rule(who=st.integers(0, CLIENTS - 1), pick=PICK)
    def settle(self, who: int, pick: int) -> None:
        known = self.some(pick, lambda one: one.messages.get(who) and DEAD not in one.expected)
        if known is not None:
            self.temps[who].settle([known.ref] * known.messages.pop(who))
            known.uncounted |= known.expected.pop(who, 0) > 0

    @rule(who=st.integers(0, CLIENTS - 1))
    def die(self, who: int) -> None:
        if any(known.uncounted and known.messages.get(who) for known in self.known):
            return
        self.clients[who].close()
        for known in self.known:
            known.held = [(holder, share) for holder, share in known.held if holder != who]
            if known.messages.pop(who, None):
                known.expected[DEAD] = known.expected.get(DEAD, 0) + known.expected.pop(who, 0)
        self.shared().settle()
        self.clients[who] = self.shared().client(name=str(who))
        self.temps[who] = TempClient(self.clients[who], direct=DIRECT[who])

    @invariant()
    def live_buffers_keep_their_bytes_and_the_books_are_right(self) -> None:
        if not hasattr(self, "clients"):
            return
        for known in self.known:
            for _, share in known.held:
                assert share.valid()
                assert (share.numpy() == known.byte).all()
        assert self.clients[0].check() == []

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        stats: dict[str, int | float] = {}
        for known in self.known:
            for giver in known.expected:
                while known.expected[giver]:
                    known.held.append((0, self.temps[0].adopt(known.ref)))
                    known.expected[giver] -= 1
            while known.held:
                known.held.pop()[1].release()
            for who, messages in known.messages.items():
                self.temps[who].settle([known.ref] * messages)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            for temp in self.temps:
                temp.flush()
            stats = self.clients[0].stats()
            if not stats["temp_published"]:
                break
        assert not stats["temp_published"]
        assert not stats["temp_bad_releases"]
        assert not stats["temp_bad_forwards"]
        for known in self.known:
            with pytest.raises(StaleDescriptor):
                self.temps[0].adopt(known.ref)
        for client in self.clients:
            client.close()
        self.shared().settle()
        with self.shared().client(role="viewer") as viewer:
            assert viewer.stats()["temp_free_bytes"] == viewer.stats()["temp_bytes"]


class TestBuffers(Buffers.TestCase):
    """Runs the machine; one server serves all its examples."""

    settings = with_settings(25, 40)

    @classmethod
    def teardown_class(cls) -> None:
        close_shared(Buffers)


@pytest.mark.long
class TestBuffersAtLength(TestBuffers):
    """The same with many more examples."""

    settings = with_settings(600, 80)
