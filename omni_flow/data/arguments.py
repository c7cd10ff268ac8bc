"""Checks of what callers pass: a value that can't be meant is refused by the name of its argument."""

from __future__ import annotations

import contextlib
import operator
from reprlib import repr as brief
from typing import Final

import numpy as np

from omni_flow.data.errors import BadArgument

MOST: Final = (1 << 63) - 1
DAY_S: Final = 24 * 3600.0
YEAR_S: Final = 366 * DAY_S


def whole(argument: str, value: object, least: int = 0, most: int = MOST) -> int:
    """`value`, a whole number from `least` to `most`, as an `int`.

    Raises:
        BadArgument: anything else; a bool is no number.
    """
    if type(value) is int and least <= value <= most:
        return value
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise BadArgument(f"{argument}: {brief(value)}", f"give a whole number, {least} to {most}")
    return number


def real(argument: str, value: object, least: float = 0.0, most: float = DAY_S) -> float:
    """`value`, a number from `least` to `most`, as a `float`; times are in seconds.

    Raises:
        BadArgument: anything else, NaN and bools among it.
    """
    try:
        number = None if isinstance(value, bool | str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not least <= number <= most:
        raise BadArgument(f"{argument}: {brief(value)}", f"give a number, {least:g} to {most:g}")
    return number


def flag(argument: str, value: object) -> bool:
    """`value`, True or False. Raises BadArgument: anything else."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise BadArgument(f"{argument}: {brief(value)}", "give True or False")


def milliseconds(argument: str, value: object) -> int:
    """A time of at most a day, given in seconds. Raises BadArgument: anything else."""
    return int(real(argument, value) * 1000)


def text(argument: str, value: object, most: int, least: int = 1) -> str:
    """`value`, a text of `least` to `most` characters that can be encoded.

    Raises:
        BadArgument: anything else.
    """
    if type(value) is str and least <= len(value) <= most and value.isascii():
        return value
    if isinstance(value, str) and least <= len(value) <= most:
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
    raise BadArgument(f"{argument}: {brief(value)}", f"give a text of {least} to {most} characters")


def endpoint(argument: str, value: object) -> str:
    """`value`, a ZMQ endpoint between processes: `ipc://PATH` or `tcp://HOST:PORT`, where `*` may stand for a port.

    Raises:
        BadArgument: anything else; ZMQ itself would take a port beyond 65535 for another one.
    """
    given = text(argument, value, 4096)
    scheme, _, rest = given.partition("://")
    host, _, port = rest.rpartition(":")
    if (scheme == "ipc" and rest) or (
        scheme == "tcp" and host and (port == "*" or (port.isdecimal() and port.isascii() and int(port) <= 0xFFFF))
    ):
        return given
    raise BadArgument(f"{argument}: {brief(value)}", "give an endpoint, tcp://HOST:PORT or ipc://PATH")
