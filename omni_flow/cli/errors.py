"""What a user did wrong, in words: one exception for every command, and the exit codes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process says to the shell."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2
    CANCELLED = 130


class UserError(Exception):
    """A mistake of the user's, shown as `what` and `mend` without a traceback; the command ends with `code`."""

    def __init__(self, what: str, mend: str = "", code: int = ExitCode.WRONG_INPUT) -> None:
        super().__init__(what if not mend else f"{what}\n{mend}")
        self.what, self.mend, self.code = what, mend, code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known: the nearest one, else all of them; empty if there are none."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"there is {', '.join(known)}" if known else ""
