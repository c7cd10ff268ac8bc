"""Typed errors of the data plane. Each names the thing and the mend, and has a code by which it crosses the wire."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

import msgspec


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """Who holds pages or bytes of a pool that is full."""

    session: int
    pid: int
    name: str
    reserved: int
    pinned: int


class DataError(Exception):
    """Base of all errors of the data plane.

    Args:
        message: what went wrong, with the names and numbers of the case.
        mend: what the caller can do about it.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, mend: str = "", holders: tuple[Holder, ...] = ()) -> None:
        super().__init__(f"{message}; {mend}" if mend else message)
        self.message = message
        self.mend = mend
        self.holders = holders


class BadMessage(DataError):
    """A message that breaks the protocol: length, version, op, body or columns."""

    code = "bad-message"


class Refused(DataError):
    """A peer that may not do this: foreign uid, read-only session, wrong role."""

    code = "refused"


class StaleEpoch(DataError):
    """The server is another one than the caller registered with; everything held there is gone. Connect again."""

    code = "stale-epoch"


class Disconnected(DataError):
    """The server can't be reached or went away during the call."""

    code = "disconnected"


class CallTimeout(DataError):
    """No reply within the time given to the call."""

    code = "call-timeout"


class UnknownName(DataError):
    """A pool, arena, tier or kind that the server does not have."""

    code = "unknown-name"


class BadToken(DataError):
    """A reservation or lease that is unknown, or belongs to another session."""

    code = "bad-token"


class BadArgument(DataError):
    """A position, count or value outside its range, or a batch that contradicts itself."""

    code = "bad-argument"


class StaleDescriptor(DataError):
    """A descriptor whose slot has been freed since, or was never published."""

    code = "stale-descriptor"


class PoolFull(DataError):
    """No room before the deadline; `holders` names who holds it."""

    code = "pool-full"


class NeverFits(PoolFull):
    """A request that no waiting can satisfy: beyond capacity, quota, or what the asker itself leaves free."""

    code = "never-fits"


class OutOfMemory(DataError):
    """Memory that the system does not give, with the number asked for."""

    code = "out-of-memory"


class SystemRefusal(DataError):
    """The operating system refused something to the server (descriptors, memory maps)."""

    code = "system"


class InternalError(DataError):
    """A defect of the server, logged there with its trace."""

    code = "internal"


class NoMover(DataError):
    """A job for which no mover process is connected."""

    code = "no-mover"


class JobFailed(DataError):
    """A migration or transfer that ended without success."""

    code = "job-failed"


def _codes() -> dict[str, type[DataError]]:
    found: dict[str, type[DataError]] = {}
    todo: list[type[DataError]] = [DataError]
    while todo:
        kind = todo.pop()
        found[kind.code] = kind
        todo.extend(kind.__subclasses__())
    return found


def from_code(code: str, message: str, mend: str, holders: tuple[Holder, ...] = ()) -> DataError:
    """Rebuild an error on the client from what crossed the wire; an unknown code gives a plain `DataError`."""
    return _codes().get(code, DataError)(message, mend, holders)


def run_process(main: Callable[[], object]) -> None:
    """Run the main function of a process of its own; a typed error ends it with its line on stderr and code 1."""
    try:
        main()
    except DataError as error:
        sys.exit(str(error))
