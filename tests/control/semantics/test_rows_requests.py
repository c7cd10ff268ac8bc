"""Rows 17 to 31 of "why each rule is there": credit, deaths, whole requests.

Each is the smallest graph that breaks without the rule. It holds in the sequential reference and under random schedules
(order, duplicates, deaths, cancels, credit 1 to 3, 1 to 3 shares); rows that are lint rules are refused. Rows about
processes rather than facts (28, and the refusal of row 19) are held by the tests of the runtime as well.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from holding import FAILED, errors, frames, holds, raising

from omni_flow.control.spec import GraphSpec, InterfaceSpec, Join, OutputSpec, PlaceholderSpec, SlotSpec
from omni_flow.testing.facts import Given
from omni_flow.testing.schedule import Faults
from omni_flow.testing.standins import HashCut


@pytest.mark.parametrize("credit", [1, 2])
def test_row_17_a_reader_that_needs_the_end_of_its_creator_is_not_waited_for(credit: int) -> None:
    holds(
        "p\nA: p -> y*, x\nI: y, x -> o\nout o = o",
        {"p": 1},
        {"o": [(0, 9), (1, 9), (2, 9), (3, 9)]},
        faults=Faults(credit=credit),
        A=lambda p: [*frames("y", 0, 1, 2, 3), ("x", 9)],
        I=lambda y, x: [("o", (y, x))],
    )


@pytest.mark.parametrize("credit", [1, 2])
def test_row_18_credit_stalls_no_diamond_join_window_or_order(credit: int) -> None:
    holds(
        """
        p
        A: p -> y*
        L: collect(y) -> s
        I: y, s -> o
        B: y -> z
        W: window(z, 4) -> w
        O: ordered(z), y -> k
        out o = o
        out w = w
        out k = k
        """,
        {"p": 1},
        {"o": [(k, 6) for k in range(6)], "w": [[0, 1, 2, 3], [4, 5]], "k": list(range(6))},
        faults=Faults(credit=credit),
        A=lambda p: frames("y", *range(6)),
        L=lambda y: [("s", len(y))],
        I=lambda y, s: [("o", (y, s))],
        B=lambda y: [("z", y)],
        W=lambda z: [("w", z)],
        O=lambda z, y: [("k", z)],
    )


def test_row_19_and_20_a_share_hosted_anew_starts_empty_under_a_new_epoch() -> None:
    _, report = holds(
        """
        p
        A: p -> y*
        B: y -> z | retries=3
        J: z, y -> o | retries=3
        out o = o
        """,
        {"p": 0},
        {"o": [(k, k) for k in range(6)]},
        schedules=200,
        faults=Faults(shares=2, losses=False),
        A=lambda p: frames("y", *range(6)),
        B=lambda y: [("z", y)],
        J=lambda z, y: [("o", (z, y))],
    )
    assert report.deaths > 20


def test_row_21_acks_are_kept_for_a_creator_that_starts_again() -> None:
    _, report = holds(
        """
        p
        I0: p -> s* | retries=3
        B: s -> b
        C: b, s -> c
        out o = c
        """,
        {"p": 0},
        {"o": [0, 1, 2, 3, 4]},
        schedules=200,
        faults=Faults(credit=1, losses=False),
        I0=lambda p: frames("s", *range(5)),
        B=lambda s: [("b", s)],
        C=lambda b, s: [("c", b)],
    )
    assert report.deaths > 20


def test_row_22_facts_of_a_second_run_are_duplicates_of_the_first() -> None:
    _, report = holds(
        "p\nA: p -> y* | retries=3\nB: y -> z\nC: collect(z) -> c\nout o = z\nout c = c",
        {"p": 0},
        {"o": [0, 1, 2, 3], "c": [[0, 1, 2, 3]]},
        schedules=200,
        faults=Faults(losses=False),
        A=lambda p: frames("y", *range(4)),
        B=lambda y: [("z", y)],
        C=lambda z: [("c", z)],
    )
    assert report.deaths > 20


def test_row_23_a_death_without_retries_fails_the_request_with_a_prefix_of_its_outputs() -> None:
    _, report = holds(
        "p\nA: p -> y*\nB: y -> z\nout o = z",
        {"p": 0},
        {"o": [0, 1, 2, 3]},
        schedules=300,
        A=lambda p: frames("y", *range(4)),
        B=lambda y: [("z", y)],
    )
    assert report.outcomes["failed"] > 5


def test_row_24_a_sink_holds_the_request_open() -> None:
    holds(
        "p\nA: p -> a\nLog: a ->\nout a = a",
        {"p": 1},
        {"a": [1]},
        runs={"Log": [""]},
        A=lambda p: [("a", p)],
        Log=lambda a: [],
    )


def test_row_24_a_sink_that_fails_fails_the_request() -> None:
    holds(
        "p\nA: p -> y*\nLog: y ->\nout a = y",
        {"p": 1},
        {"a": [1, 2]},
        outcome="failed",
        A=lambda p: frames("y", 1, 2),
        Log=lambda y: raising(),
    )


def test_row_25_a_cancel_or_deadline_gives_one_outcome_and_a_prefix() -> None:
    _, report = holds(
        "p\nA: p -> y*\nB: y -> z\nout o = z\nout all = collect(z)",
        {"p": 0},
        {"o": [0, 1, 2, 3], "all": [[0, 1, 2, 3]]},
        schedules=300,
        faults=Faults(deaths=False, losses=False),
        A=lambda p: frames("y", *range(4)),
        B=lambda y: [("z", y)],
    )
    assert report.outcomes["cancelled"] > 5
    assert report.outcomes["deadline"] > 5


def test_row_26_a_frame_behind_the_close_opens_no_bucket() -> None:
    holds(
        "p\nA: p -> y*\nB: y -> z\nC: z -> c\nout first = count(c, 1)",
        {"p": 0},
        {"first": [[0]]},
        schedules=200,
        A=lambda p: frames("y", *range(6)),
        B=lambda y: [("z", y)],
        C=lambda z: [("c", z)],
    )


def test_row_27_params_are_a_snapshot_of_the_request() -> None:
    graph = "p\nparam n = 2\nA: p -> y*\nJ: count(y, param.n) -> j\nK: count(y, param.n) -> k\nout j = j\nout k = k"
    roles = {
        "A": lambda p: frames("y", *range(4)),
        "J": lambda y: [("j", len(y))],
        "K": lambda y: [("k", len(y))],
    }
    holds(graph, {"p": 0}, {"j": [2], "k": [2]}, **roles)
    holds(graph, {"p": 0}, {"j": [3], "k": [3]}, params={"n": 3}, **roles)


def test_row_29_a_policy_of_ones_own_cuts_by_the_frames_in_order() -> None:
    def graph(policy: HashCut) -> GraphSpec:
        slot = SlotSpec("p", "p", size=policy.max_frames, stride=policy.max_frames, policy=policy)
        return GraphSpec(
            name="policy",
            placeholders=(PlaceholderSpec("p", stream=True),),
            interfaces=(InterfaceSpec("W", "W", "W", ((replace(slot, join=Join.WINDOW),),), (OutputSpec("w", "w"),)),),
            outputs={"o": SlotSpec("w", "w")},
        )

    roles = {"W": lambda p: [("w", p)]}
    holds(graph(HashCut(3, 10**9)), {"p": [1, 2, 3, 4]}, {"o": [[1, 2, 3], [4]]}, **roles)
    holds(graph(HashCut(3, 1)), {"p": [1, 2, 3]}, {"o": [[1], [2], [3]]}, **roles)


def test_row_30_a_graph_used_twice_keeps_its_buckets_apart() -> None:
    holds(
        """
        p, q
        a1: p -> x1* | role=enc
        b1: x1 -> y1 | role=enc
        a2: q -> x2* | role=enc
        b2: x2 -> y2 | role=enc
        J: collect(y1), collect(y2) -> o
        out o = o
        """,
        {"p": 1, "q": 5},
        {"o": [([1, 2], [5, 6])]},
        a1=lambda p: frames("x1", p, p + 1),
        b1=lambda x1: [("y1", x1)],
        a2=lambda q: frames("x2", q, q + 1),
        b2=lambda x2: [("y2", x2)],
        J=lambda y1, y2: [("o", (y1, y2))],
    )


def test_row_31_an_input_that_is_not_sent_is_absent() -> None:
    holds(
        """
        p, q, s*
        A: optional(p), q -> a
        B: optional(p), optional(q), optional(collect(s)) -> b
        out a = a
        out b = b
        """,
        {"p": 1, "q": None},
        {"a": [], "b": [(1, None, None)]},
        A=lambda q, p=None: [("a", 1)],
        B=lambda p=None, q=None, s=None: [("b", (p, q, s))],
    )


def test_row_31_an_empty_group_is_refused() -> None:
    spec = GraphSpec(
        "g",
        interfaces=(InterfaceSpec("A", "A", "A", ((),), (OutputSpec("a", "a"),)),),
        outputs={"o": SlotSpec("a", "a")},
    )
    assert "empty-group" in errors(spec)


@pytest.mark.parametrize(
    "given",
    [
        Given([("a", 1), ("a", 2), ("b", 3)]),
        Given([("a", 1), ("nobody", 2), ("b", 3)]),
    ],
    ids=["twice", "unknown"],
)
def test_row_31_a_role_error_fails_the_outputs_still_open(given: Given) -> None:
    holds(
        "p\nA: p -> a, b, y*\nout a = a\nout b = b\nout y = y",
        {"p": 0},
        {"a": [1], "b": [FAILED], "y": [FAILED]},
        outcome="failed",
        A=lambda p: given,
    )
