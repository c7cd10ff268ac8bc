"""Rows 1 to 9 of "why each rule is there": groups, joins, routes.

Each is the smallest graph that breaks without the rule. It holds in the sequential reference and under random schedules
(order, duplicates, deaths, cancels, credit 1 to 3, 1 to 3 shares); rows that are lint rules are refused.
"""

from __future__ import annotations

import pytest
from holding import FAILED, errors, frames, holds

from omni_flow.refs import ABSENT
from omni_flow.testing.schedule import Faults


def test_row_01_declared_order_waits_for_the_richer_group() -> None:
    holds(
        """
        text, image
        Enc: image -> emb
        Llm: [[text, emb], [text]] -> answer
        out answer = answer
        """,
        {"text": "t", "image": "i"},
        {"answer": [("t", "E(i)")]},
        Enc=lambda image: [("emb", f"E({image})")],
        Llm=lambda text, emb=None: [("answer", (text, emb))],
    )


def test_row_02_only_an_earlier_subset_shadows() -> None:
    graph = "text, emb\nL: {} -> o\nout o = o"
    assert errors(graph.format("[[text], [text, emb]]")) == ["shadowed-group"]
    assert errors(graph.format("[[text, emb], [text]]")) == []


def test_row_03_count_takes_the_lowest_numbered_frames() -> None:
    holds(
        "p\nA: p -> y*\nB: y -> z\nJ: count(z, 2) -> o\nout o = o",
        {"p": 0},
        {"o": [[0, 10]]},
        A=lambda p: frames("y", 0, 1, 2, 3),
        B=lambda y: [("z", 10 * y)],
        J=lambda z: [("o", z)],
    )


@pytest.mark.parametrize(
    ("n", "list_given", "outcome"),
    [
        (2, [0, 1], "done"),
        (9, "default", "done"),
        (ABSENT, "default", "done"),
        (0, "default", "done"),
        (-1, "default", "done"),
        ("two", FAILED, "failed"),
    ],
)
def test_row_04_count_of_a_late_absent_zero_or_odd_n(n: object, list_given: object, outcome: str) -> None:
    holds(
        "p\nA: p -> y*\nK: p -> n\nJ: optional(count(y, n)), p -> o\nout o = o",
        {"p": 7},
        {"o": [list_given]},
        outcome=outcome,
        A=lambda p: frames("y", 0, 1, 2),
        K=lambda p: [("n", n)],
        J=lambda p, y="default": [("o", y)],
    )


@pytest.mark.parametrize("given", [[], [("x", 1)], [("y", 1), ("y", 2)]], ids=["empty", "never", "all absent"])
def test_row_05_a_list_is_never_empty(given: list[tuple[str, int]]) -> None:
    holds(
        "p\nA: p -> y*, x\nB: y -> z\nC: collect(z) -> c\nD: optional(collect(z)), p -> d\nout c = c\nout d = d",
        {"p": 0},
        {"c": [], "d": ["default"]},
        A=lambda p: given,
        B=lambda y: [("z", ABSENT)],
        C=lambda z: [("c", z)],
        D=lambda p, z="default": [("d", z)],
    )


def test_row_06_the_creator_tells_the_end_of_what_others_compute() -> None:
    holds(
        "p\nA: p -> y*\nB: y -> z\nJ: collect(z) -> o\nout o = o",
        {"p": 0},
        {"o": [[0, 2, 4]]},
        faults=Faults(shares=3),
        A=lambda p: frames("y", 0, 1, 2, 3, 4),
        B=lambda y: [("z", y if y % 2 == 0 else ABSENT)],
        J=lambda z: [("o", z)],
    )


def test_row_07_each_share_gets_what_its_slots_need() -> None:
    holds(
        "p*\nB: p -> b\nJ: b, bind(all, collect(p)) -> o\nout o = o",
        {"p": [1, 2, 3, 4]},
        {"o": [(1, [1, 2, 3, 4]), (2, [1, 2, 3, 4]), (3, [1, 2, 3, 4]), (4, [1, 2, 3, 4])]},
        faults=Faults(shares=3),
        B=lambda p: [("b", p)],
        J=lambda b, all: [("o", (b, all))],
    )


def test_row_08_a_closed_bucket_does_not_swallow_frames_that_others_need() -> None:
    holds(
        "p*\nB: p -> b\nJ: b, bind(all, collect(p)) -> o\nout o = o",
        {"p": [1, 2, 3, 4]},
        {"o": [(2, [1, 2, 3, 4]), (4, [1, 2, 3, 4])]},
        schedules=120,
        B=lambda p: [("b", p if p % 2 == 0 else ABSENT)],
        J=lambda b, all: [("o", (b, all))],
    )


def test_row_09_an_end_closes_no_bucket_and_a_late_broadcast_meets_all_frames() -> None:
    holds(
        "p, t\nA: p -> y*\nT: t -> e\nB: y, e -> z\nout o = z",
        {"p": 0, "t": "T"},
        {"o": ["T0", "T1", "T2"]},
        runs={"B": ["y#0", "y#1", "y#2"]},
        faults=Faults(shares=3),
        A=lambda p: frames("y", 0, 1, 2),
        T=lambda t: [("e", t)],
        B=lambda y, e: [("z", f"{e}{y}")],
    )
