"""Facts, messages and the cell that holds a fact.

A *fact* about a field and a path is a value, ABSENT or a `Failure`, said once. An *end* says how many numbers a source
created under a path. Both are single assignment: the first to arrive stands.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omni_flow.control.plan import Path
from omni_flow.refs import ABSENT, Absent


class Waiting:
    """Type of `WAITING`, the content of a cell whose fact is not known yet."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "WAITING"


WAITING: Final = Waiting()


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A failed fact: which interface failed, at which activation, and why, for people to read."""

    interface: str
    path: str
    cause: str

    def __str__(self) -> str:
        place = f"{self.interface}[{self.path}]" if self.path else self.interface
        return f"{place}: {self.cause}"


Cell = Any
"""WAITING, ABSENT, a Failure, or anything else: then it is the value."""

Torn = bool | Failure
"""Of an end: False if the stream is whole, else what failed, or True if that is not known."""

VALUE: Final = 0
MISSING: Final = 1
FAILED: Final = 2
END: Final = 3
ACK: Final = 4


class Message(msgspec.Struct, array_like=True, gc=False):
    """What shares say to each other. `kind` decides how the rest is read.

    VALUE, MISSING, FAILED: `ref` is the field, `path` the fact's path, `value` the payload or the Failure.
    END: `ref` is the source, `path` the parent, `number` the count, `value` whether torn (`Torn`).
    ACK: `ref` is the source, `path` the parent, `number` what was released, `value` (reader interface or GATEWAY,
    share or output index of the reader).
    """

    kind: int
    ref: int
    path: Path
    number: int = 0
    value: Any = None


def fact(field: int, path: Path, cell: Cell) -> Message:
    """The message that says `cell` about `field` at `path`."""
    if cell is ABSENT:
        return Message(MISSING, field, path)
    if type(cell) is Failure:
        return Message(FAILED, field, path, 0, cell)
    return Message(VALUE, field, path, 0, cell)


def cell_of(message: Message) -> Cell:
    """What a fact message says, as the content of a cell."""
    return ABSENT if message.kind == MISSING else message.value


__all__ = [
    "ABSENT",
    "ACK",
    "END",
    "FAILED",
    "MISSING",
    "VALUE",
    "WAITING",
    "Absent",
    "Cell",
    "Failure",
    "Message",
    "Torn",
    "Waiting",
    "cell_of",
    "fact",
]
