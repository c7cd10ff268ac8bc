"""Graphs that broke once: each was found by the fuzzer and cut down by hand."""

from __future__ import annotations

from holding import FAILED, frames, holds, raising

from omni_flow.refs import ABSENT
from omni_flow.testing.schedule import Faults


def test_two_windows_may_wait_with_different_frames_of_one_stream() -> None:
    """W of a windowed stream is 1 + the sum of size + left - 1: the greatest of them alone stalls here."""
    holds(
        """
        p*
        A: p -> a
        B: p -> b
        V: window(a, 3, stride=1) -> v
        W: window(b, 2, stride=1, left=1) -> w
        out v = v
        out w = w
        """,
        {"p": [1, 2, 3, 4, 5, 6]},
        {"v": [[2, 3, 5], [3, 5, 6]], "w": [[1, 4]]},
        faults=Faults(credit=1),
        A=lambda p: [("a", p if p in (2, 3, 5, 6) else ABSENT)],
        B=lambda p: [("b", p if p in (1, 4) else ABSENT)],
        V=lambda a: [("v", a)],
        W=lambda b: [("w", b)],
    )


def test_the_parent_of_a_failing_ordered_stream_is_closed_once() -> None:
    """Closed twice it would count for its sibling, and the parent's parent be done too early."""
    holds(
        """
        p*
        A: p -> y*
        B: y -> z
        O: ordered(z), p -> o
        out o = collect(o, levels=2)
        """,
        {"p": [1, 2, 3, 4]},
        {"o": [FAILED]},
        outcome="failed",
        schedules=120,
        A=lambda p: frames("y", 10 * p, 10 * p + 1, 10 * p + 2),
        B=lambda y: [("z", y)],
        O=lambda z, p: raising() if z % 10 == 0 and p < 4 else [("o", z)],
    )


def test_a_long_ordered_stream_that_fails_at_its_first_frame_is_closed_without_recursion() -> None:
    holds(
        "p\nA: p -> y*\nT: collect(y) -> e\nO: ordered(y), e -> o\nout o = o",
        {"p": 0},
        {"o": [FAILED]},
        outcome="failed",
        schedules=2,
        A=lambda p: frames("y", *range(1500)),
        T=lambda y: [("e", len(y))],
        O=lambda y, e: raising(),
    )
