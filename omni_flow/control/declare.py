"""What every declaration of the DSL shares: where it was written, and the error for a plain misuse."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_OWN = str(Path(__file__).parent) + "/"


class DeclarationError(TypeError):
    """An argument of a declaration that is of the wrong kind, refused at the call that makes it.

    `argument` is its name as the user would write it (`inputs[0][1]`). What only the whole graph can show is a
    `Finding` instead, so that lint shows all of them at once.
    """

    def __init__(self, argument: str, expected: str, got: object) -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        super().__init__(f"{argument}: expected {expected}, got {got!r}")


def where() -> str:
    """ "file:line" of the nearest caller outside this package, or an empty string."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def need_str(argument: str, value: object) -> str:
    """`value` if it is a string that is not empty; else `DeclarationError`."""
    if not isinstance(value, str) or not value:
        raise DeclarationError(argument, "a name", value)
    return value


def need_int(argument: str, value: object, least: int) -> int:
    """`value` if it is an int (not a bool) of at least `least`; else `DeclarationError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DeclarationError(argument, f"an int of at least {least}", value)
    return value


def need_bool(argument: str, value: object) -> bool:
    """`value` if it is a bool; else `DeclarationError`."""
    if not isinstance(value, bool):
        raise DeclarationError(argument, "True or False", value)
    return value
