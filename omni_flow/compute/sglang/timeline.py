"""When a request passed which step on its way to its first token, where it asked for that.

Times are monotonic nanoseconds, which all processes of a machine read from one clock. The steps, in their order (those
of lower tiers only where pages come from there); a step is named for what has just ended:

    asked       `generate` was called (in the role's process, as `admitted` and `first_token`)
    admitted    checked and laid out
    received    read by the engine's scheduler
    named       its page keys are made, and where the pages lie is asked
    probed      the manager has said so
    fetched     pages of lower tiers are in L1
    pinned      and are found there
    queued      SGLang has the request
    chosen      SGLang looks for its prefix: it is to be in the next batch
    matched     the prefix is found and pinned
    prepared    the batch has its pages and tensors
    launched    its forward has been launched (on a CPU: has run)
    collected   SGLang turns to its results, and waits for them
    computed    the results are on the host and entered
    answered    the first token is a message
    first_token the role has it
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

Mark = tuple[str, int]
STEPS: Final = (
    "asked", "admitted", "received", "named", "probed", "fetched", "pinned", "queued", "chosen", "matched", "prepared",
    "launched", "collected", "computed", "answered", "first_token",
)  # fmt: skip


class Timelines:
    """Of the requests of an engine process that asked for one, by SGLang's name of the request. A step that a request
    passes again (chunks of a long prompt) is noted again, up to the first token."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[str, list[Mark]] = {}

    def begin(self, rid: str) -> None:
        """This request has asked for its timeline, and was received."""
        self._of[rid] = []
        self.mark(rid, "received")

    def mark(self, rid: str, step: str) -> None:
        """A request has passed a step; nothing where it did not ask."""
        marks = self._of.get(rid)
        if marks is not None:
            marks.append((step, time.monotonic_ns()))

    def mark_all(self, requests: Iterable[Any], step: str) -> None:
        """The same for all of a batch of SGLang's."""
        if self._of:
            for request in requests:
                self.mark(request.rid, step)

    def mark_extends(self, batch: Any, step: str) -> None:
        """The same where that batch computes prompts; a step of decode is none of these."""
        if self._of and batch.forward_mode.is_extend():
            self.mark_all(batch.reqs, step)

    def end(self, rid: str) -> list[Mark]:
        """What was noted; nothing is from now on."""
        return self._of.pop(rid, [])


def durations(timeline: Sequence[Mark]) -> dict[str, float]:
    """Milliseconds that each step took since the one before it; of a step that came again, all together."""
    took: dict[str, float] = {}
    for (_, before), (step, at) in pairwise(timeline):
        took[step] = took.get(step, 0.0) + (at - before) / 1e6
    return took
