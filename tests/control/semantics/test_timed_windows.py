"""Windows of a policy that looks at a clock: where they are cut may vary, everything else may not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import cycle
from random import Random
from typing import Any

import pytest
from holding import frames

from omni_flow import Graph, alaunch, collect, stream, window
from omni_flow.control.joins import Windows
from omni_flow.control.spec import GraphSpec, Join
from omni_flow.testing.cutting import Cuts, InvalidChoiceError
from omni_flow.testing.facts import Path
from omni_flow.testing.notation import parse_graph
from omni_flow.testing.reference import interpret
from omni_flow.testing.schedule import Faults
from omni_flow.testing.simulate import Report, simulate
from omni_flow.testing.standins import Functions

GRAPH = """
    p, q
    A: p -> y*
    B: y -> z
    W: window(z, 3, left=1), optional(q) -> w
    N: w -> n
    T: collect(w) -> t
    out w = w
    out n = n
    out t = t
    out two = count(w, 2)
"""
ROLES = Functions(
    A=lambda p: frames("y", *range(p)),
    B=lambda y: [] if y % 4 == 3 else [("z", y)],
    W=lambda z, q=None: [("w", z)],
    N=lambda w: [("n", len(w))],
    T=lambda w: [("t", w)],
)


class Waits:
    """Cuts when what is there has waited for `s` seconds of a clock."""

    timed = True

    def __init__(self, max_frames: int, clock: Callable[[], float], s: float = 0.5) -> None:
        self.max_frames = max_frames
        self._clock = clock
        self._s = s

    def cut(self, frames: Sequence[Any], start: int, ended: bool) -> int | None:
        return len(frames) if self._clock() >= self._s or len(frames) - start >= self.max_frames else None


def timed(policy: Waits) -> GraphSpec:
    """The graph with that policy for its window."""
    spec = parse_graph(GRAPH)

    def with_policy(slot: Any) -> Any:
        if slot.join is not Join.WINDOW:
            return slot
        return replace(slot, size=policy.max_frames, stride=policy.max_frames, policy=policy)

    interfaces = tuple(
        replace(i, groups=tuple(tuple(with_policy(slot) for slot in group) for group in i.groups))
        for i in spec.interfaces
    )
    return replace(spec, interfaces=interfaces)


def simulated(seed: int) -> Report:
    clock = Random(seed)  # a clock that says anything
    return simulate(timed(Waits(3, clock.random)), schedules=40, seed=seed, roles=ROLES, inputs={"p": 11, "q": 1})


def test_under_any_clock_a_run_agrees_with_the_reference_given_where_it_was_cut() -> None:
    for seed in range(10):
        report = simulated(seed)
        assert not report.divergences, report.show()
        assert report.outcomes["done"] > 10


def test_windows_of_a_torn_stream_and_of_one_without_frames_agree_too() -> None:
    clock = Random(1)
    torn = Functions(
        A=lambda p: frames("y", *range(p)),
        B=lambda y: [("z", y)] if y < 7 else [("nonsense", y)],
        W=lambda z, q=None: [("w", z)],
        N=lambda w: [("n", len(w))],
        T=lambda w: [("t", w)],
    )
    for p in (0, 1, 9):
        report = simulate(timed(Waits(3, clock.random)), schedules=60, roles=torn, inputs={"p": p, "q": 1})
        assert not report.divergences, report.show()


def test_a_frame_that_is_lost_between_two_windows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Windows._cut

    def skipping(self: Windows, total: int) -> int | None:
        stop = cut(self, total)
        if stop is not None and self.born == 1:
            self._start += 1
        return stop

    monkeypatch.setattr(Windows, "_cut", skipping)
    assert any(simulated(seed).divergences for seed in range(5))


@pytest.mark.parametrize(
    "told",
    [
        Cuts([4], None),
        Cuts([0], None),
        Cuts([3, 3, 3], None),
        Cuts([3, 3], 2),
        Cuts([3, 1], 6),
    ],
)
def test_windows_that_no_clock_could_make_are_refused(told: Cuts) -> None:
    spec = timed(Waits(3, lambda: 0.0))
    where: tuple[str, Path] = ("W@win", ())
    interpret(spec, {"p": 9, "q": 1}, None, ROLES, cuts={where: Cuts([1, 2, 3], 4)})
    with pytest.raises(InvalidChoiceError):
        interpret(spec, {"p": 9, "q": 1}, None, ROLES, cuts={where: told})


class Halting:
    """A stream that pauses after each third word, for longer than the policy waits."""

    async def speak(self, n: int) -> AsyncIterator[int]:
        for k in range(n):
            if k and k % 3 == 0:
                await asyncio.sleep(0.12)
            yield k

    async def gather(self, words: list[int]) -> list[int]:
        return words


class Pause:
    """Cuts before a word that comes later than `s` after the one before: what was said in one breath."""

    timed = True
    max_frames = 64

    def __init__(self, s: float) -> None:
        self._s = s
        self._heard: dict[int, float] = {}

    def cut(self, frames: Sequence[Any], start: int, ended: bool) -> int | None:
        now = time.monotonic()
        last = self._heard.get(len(frames) - 1, now)
        self._heard[len(frames)] = now
        return len(frames) - 1 if now - last > self._s and len(frames) - 1 > start else None


def breaths(policy: Any) -> Graph:
    graph = Graph("breaths")
    halting = graph.role("halting", Halting)
    words = halting.interface("speak", inputs=[[graph.placeholder("n", int)]], outputs=[stream("word")])
    gathered = graph.role("gathering", Halting).interface(
        "gather", inputs=[[{"words": window(words.word, policy=policy)}]], outputs=["breath"]
    )
    graph.output(breath=gathered.breath, all=collect(gathered.breath))
    return graph


async def spoken(policy: Any, n: int, options: dict[str, Any]) -> dict[str, Any]:
    async with alaunch(breaths(policy), **options) as app, asyncio.timeout(60):
        return await (await app.submit(n=n)).result()


everywhere = pytest.mark.parametrize("options", [{"processes": False}, {"memory": None}], ids=["one loop", "processes"])


@everywhere
def test_the_runtime_asks_the_clock_once_for_each_frame_in_order(options: dict[str, Any]) -> None:
    result = asyncio.run(spoken(Waits(5, cycle([0.0, 1.0]).__next__), 7, options))
    assert result["breath"] == [[0, 1], [2, 3], [4, 5], [6]]
    assert result["all"] == result["breath"]


@everywhere
def test_a_real_clock_loses_no_frame_and_keeps_their_order(options: dict[str, Any]) -> None:
    result = asyncio.run(spoken(Pause(0.06), 10, options))
    assert [word for breath in result["breath"] for word in breath] == list(range(10))
    assert result["all"] == result["breath"]


def test_credit_of_one_stalls_no_timed_window() -> None:
    report = simulate(
        timed(Waits(3, Random(4).random)), schedules=60, roles=ROLES, inputs={"p": 12, "q": 1}, faults=Faults(credit=1)
    )
    assert not report.divergences, report.show()
