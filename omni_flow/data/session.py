"""A session: one connection, and everything that is held through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from omni_flow.data.errors import DataError
from omni_flow.data.protocol import ERROR, EVENT, FDS, REPLY, Column, Failure, Message, encode


class Wire(Protocol):
    """The sending half of a connection."""

    def send(self, data: bytes, fds: Sequence[int]) -> None:
        """Send or queue one message; never blocks."""

    def shut(self) -> None:
        """End the connection."""


class Session:
    """One client as the server sees it.

    `state` is for the services, one key each. `ready` is false before `HELLO`.
    """

    __slots__ = (
        "closed",
        "epoch",
        "id",
        "kinds",
        "name",
        "pid",
        "quotas",
        "read_only",
        "ready",
        "role",
        "secret",
        "send",
        "state",
        "uid",
        "wire",
    )

    def __init__(self, number: int, wire: Wire, pid: int, uid: int, epoch: int) -> None:
        self.id = number
        self.wire = wire
        self.send = wire.send
        self.pid = pid
        self.uid = uid
        self.epoch = epoch
        self.name = ""
        self.role = "client"
        self.read_only = False
        self.kinds: tuple[str, ...] = ()
        self.quotas: dict[str, int] = {}
        self.ready = False
        self.closed = False
        self.secret = 0
        self.state: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"session {self.id} ({self.name or self.role}, pid {self.pid})"

    def reply(
        self,
        message: Message,
        body: msgspec.Struct | None = None,
        columns: Sequence[Column | bytes] = (),
        fds: Sequence[int] = (),
    ) -> None:
        """Answer a request, now or later; once per request. Nothing happens when the session has ended."""
        if not self.closed:
            flags = REPLY | FDS if fds else REPLY
            self.send(encode(message.op, flags, message.request, self.epoch, body, columns), fds)

    def fail(self, message: Message, error: DataError) -> None:
        """Answer a request with an error."""
        self.refuse(message.op, message.request, error)

    def refuse(self, op: int, request: int, error: DataError) -> None:
        """Answer a message that could not be decoded."""
        if not self.closed:
            body = Failure(error.code, error.message, error.mend, error.holders)
            self.wire.send(encode(op, REPLY | ERROR, request, self.epoch, body), ())

    def event(self, op: int, body: msgspec.Struct | None = None, columns: Sequence[Column] = ()) -> None:
        """Tell the client something it did not ask for."""
        if not self.closed:
            self.wire.send(encode(op, EVENT, 0, self.epoch, body, columns), ())


class Handler(Protocol):
    def __call__(self, session: Session, message: Message, /) -> None: ...


class Service(Protocol):
    """A set of operations of the server; see `docs/data_plane.md`."""

    @property
    def ops(self) -> Mapping[int, Handler]:
        """Operation number → handler."""

    def opened(self, session: Session) -> None:
        """A session has said `HELLO`. May raise a `DataError` to refuse it."""

    def closed(self, session: Session) -> Iterator[None]:
        """Give back everything of a session that has ended; yields after at most a millisecond of work."""

    def tick(self, now: float) -> float | None:
        """Do what is due; returns when to be called again (monotonic seconds), None: no need."""

    def stats(self) -> dict[str, int | float]:
        """Plain numbers."""

    def held(self, session: Session) -> dict[str, Any]:
        """What a session holds, for people: by a name of the service's own."""

    def overview(self) -> dict[str, Any]:
        """What there is and whose it is, for people: by a name of the service's own."""

    def check(self) -> list[str]:
        """Violated invariants."""


class BaseService:
    """A service that holds nothing and has nothing to do; a base for those that do."""

    @property
    def ops(self) -> Mapping[int, Handler]:
        return {}

    def opened(self, session: Session) -> None:
        return None

    def closed(self, session: Session) -> Iterator[None]:
        yield from ()

    def tick(self, now: float) -> float | None:
        return None

    def stats(self) -> dict[str, int | float]:
        return {}

    def held(self, session: Session) -> dict[str, Any]:
        return {}

    def overview(self) -> dict[str, Any]:
        return {}

    def check(self) -> list[str]:
        return []
