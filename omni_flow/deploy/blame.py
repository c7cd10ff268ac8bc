"""What went wrong in a user's code, in one line: the exception, where in their own file, and the mend."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

_OURS = ("/omni_flow/control/", "/omni_flow/deploy/", "/asyncio/", "/concurrent/futures/", "/threading.py", "importlib")


@dataclass(frozen=True, slots=True)
class Blame:
    """`cause` with its place, `mend` if there is one to give, the traceback as `trace`."""

    cause: str
    mend: str
    trace: str

    def __str__(self) -> str:
        return f"{self.cause}; {self.mend}" if self.mend else self.cause


def blame(error: BaseException) -> Blame:
    """What to tell of an exception that user code raised."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not any(part in frame.filename for part in _OURS):
            place = f" ({frame.filename}:{frame.lineno})"
    return Blame(f"{type(error).__name__}: {error}{place}", _mend(error), "".join(traceback.format_exception(error)))


def _mend(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install what provides {error.name!r}"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"make {error.filename!r} there, or name another file in the role's init"
    if isinstance(error, MemoryError):
        return "give the machine more memory, or the role a smaller model"
    if isinstance(error, TypeError) and "__init__" in str(error):
        return "give the role's constructor what it takes: `init={...}` of graph.role"
    return ""
