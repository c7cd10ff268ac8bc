"""Operations 0x50 to 0x5F of the memory manager: the feed of the directory, and questions to it."""

from typing import Final

import msgspec

DIR_WATCH: Final = 0x50
"""The node process, which becomes the one that is told of changes and asked."""
DIR_ROWS: Final = 0x51
DIR_CHANGED: Final = 0x52
"""Event: columns u64 prefix, u8 there, in order."""
DIR_LOCATE: Final = 0x53
"""A client: column of keys; answered with `DirAnswer` and one u8 column of packed bits, node after node."""
DIR_ASK: Final = 0x54
"""Event to the node process: column of keys."""
DIR_ANSWER: Final = 0x55
DIR_REPORT: Final = 0x56
"""The node process tells its counters, with each beat."""

ROWS_A_PAGE: Final = 16_384


class DirPools(msgspec.Struct, array_like=True):
    """Reply to DIR_WATCH."""

    pools: tuple[str, ...]


class DirRowsAsk(msgspec.Struct, array_like=True):
    """Prefixes of the objects in `ROWS_A_PAGE` rows from `start` on."""

    pool: str
    start: int


class DirRows(msgspec.Struct, array_like=True):
    """`next`: where to go on, -1 at the end. Column u64."""

    next: int


class DirPool(msgspec.Struct, array_like=True):
    pool: str


class DirAsk(msgspec.Struct, array_like=True):
    id: int
    pool: str


class DirAnswer(msgspec.Struct, array_like=True):
    """`nodes`: all that are known, those that hold nothing included. `masks`: the names of those with a mask."""

    id: int
    nodes: tuple[str, ...]
    masks: tuple[str, ...]


class DirReport(msgspec.Struct, array_like=True):
    """Counters of the node process by name, shown as `transfer_<name>`."""

    numbers: dict[str, int]
