"""Rows 10 to 16 of "why each rule is there": loops, failures, windows, order.

Each is the smallest graph that breaks without the rule. It holds in the sequential reference and under random schedules
(order, duplicates, deaths, cancels, credit 1 to 3, 1 to 3 shares); rows that are lint rules are refused.
"""

from __future__ import annotations

import pytest
from holding import FAILED, errors, holds, raising

from omni_flow.refs import ABSENT


def test_row_10_a_back_edge_may_not_wait_for_the_end_of_its_own_loop() -> None:
    assert errors("p\nH: [[p], [fb]] -> x | max_iters=3\nB: x, bind(l, last(x)) -> y\nfeedback fb = y\nout o = x") == [
        "own-end"
    ]


def test_row_11_a_loop_is_a_stream_of_its_iterations() -> None:
    holds(
        """
        p
        H: [[p], [fb]] -> x, exit | max_iters=5
        feedback fb = x
        out each = exit
        out last = last(exit)
        out all = collect(exit)
        out two = count(exit, 2)
        """,
        {"p": 1},
        {"each": [10, 20, 30], "last": [30], "all": [[10, 20, 30]], "two": [[10, 20]]},
        H=lambda p=0, fb=0: [("exit", 10 * (p or fb))] + ([("x", (p or fb) + 1)] if (p or fb) < 3 else []),
    )


def test_row_12_max_iters_ends_a_loop_that_would_go_on() -> None:
    holds(
        "p\nH: [[p], [fb]] -> x | max_iters=3\nfeedback fb = x\nout o = x",
        {"p": 1},
        {"o": [2, 3, 4]},
        runs={"H": ["H@loop#0", "H@loop#1", "H@loop#2"]},
        H=lambda p=0, fb=0: [("x", (p or fb) + 1)],
    )


def test_row_12_iteration_0_exists_although_the_entry_is_absent() -> None:
    result, _ = holds(
        "p\nH: [[p], [fb]] -> x | max_iters=3\nfeedback fb = x\nout o = collect(x)",
        {"p": None},
        {"o": []},
        H=lambda p=0, fb=0: [("x", 1)],
    )
    assert result.ends["H@loop", ()] == (1, False)


def test_row_12_two_feedback_slots_and_groups_of_a_head() -> None:
    holds(
        """
        p, q
        H: [[p, q], [p], [fa, fb], [fa]] -> a, b, o | max_iters=4
        feedback fa = a
        feedback fb = b
        out o = o
        """,
        {"p": 1, "q": None},
        {"o": [(1, None, 0, 0), (0, None, 2, 9), (0, None, 3, 0)]},
        H=lambda p=0, q=None, fa=0, fb=0: (
            [("o", (p, q, fa, fb))] + ([("a", (p or fa) + 1)] if fa < 3 else []) + ([("b", 9)] if p else [])
        ),
    )


def test_row_12_loops_nest() -> None:
    holds(
        """
        p
        H: [[p], [fb]] -> a | max_iters=2
        K: [[a], [gb]] -> b, c | max_iters=3
        R: last(c) -> r
        feedback fb = r
        feedback gb = b
        out o = r
        out inner = c
        """,
        {"p": 0},
        {"o": [2, 4], "inner": [0, 1, 2, 2, 3, 4]},
        H=lambda p=None, fb=None: [("a", p if fb is None else fb)],
        K=lambda a=None, gb=None: [("c", a if gb is None else gb), ("b", (a if gb is None else gb) + 1)],
        R=lambda c: [("r", c)],
    )


def test_row_13_dead_comes_before_failed() -> None:
    holds(
        "p\nA: p -> a\nB: p -> b\nC: p -> c\nJ: [[a, b], [c]] -> o\nout o = o",
        {"p": 1},
        {"o": ["c"]},
        schedules=120,
        A=lambda p: [],
        B=lambda p: raising(),
        C=lambda p: [("c", 1)],
        J=lambda a=0, b=0, c=0: [("o", "c" if c else "ab")],
    )


def test_row_14_what_was_given_before_an_exception_stays() -> None:
    holds(
        """
        p
        A: p -> y*, x, late
        B: y -> z
        out each = z
        out all = collect(z)
        out x = x
        out late = late
        """,
        {"p": 1},
        {"each": [10, 20, FAILED], "all": [FAILED], "x": [5], "late": [FAILED]},
        outcome="failed",
        A=lambda p: raising(("y", 1), ("x", 5), ("y", 2)),
        B=lambda y: [("z", 10 * y)],
    )


@pytest.mark.parametrize(
    ("sent", "size", "stride", "left", "windows"),
    [
        ([1, 2, 3, 4, 5], 2, 2, 0, [[1, 2], [3, 4], [5]]),
        ([1, 2, 3, 4], 3, 1, 0, [[1, 2, 3], [2, 3, 4]]),
        ([1, 2, 3, 4, 5], 2, 2, 1, [[1, 2], [2, 3, 4], [4, 5]]),
        ([1, 2], 3, 3, 0, [[1, 2]]),
        ([], 3, 3, 0, []),
        ([1, 0, 3, 0, 5, 0], 2, 2, 0, [[1, 3], [5]]),
        ([1, 2, 3, -1, 5], 2, 2, 0, [[1, 2], FAILED]),
    ],
)
def test_row_15_windows_run_over_present_frames(
    sent: list[int], size: int, stride: int, left: int, windows: list[object]
) -> None:
    holds(
        f"p*\nB: p -> z\nW: window(z, {size}, stride={stride}, left={left}) -> w\nout o = w",
        {"p": sent},
        {"o": windows},
        outcome="failed" if FAILED in windows else "done",
        B=lambda p: raising() if p < 0 else [("z", p or ABSENT)],
        W=lambda z: [("w", z)],
    )


def test_row_15_two_windows_in_one_interface_are_refused() -> None:
    assert "two-windows" in errors("p*, q*\nW: window(p, 2), window(q, 2) -> w\nout o = w")


def test_row_16_ordered_runs_by_number_over_dead_ones_and_fails_after_a_failed_one() -> None:
    result, _ = holds(
        "p*\nB: p -> z\nO: ordered(z) -> o\nout o = o",
        {"p": [1, 0, 3, 4, -5, 6]},
        {"o": [1, 3, 4, FAILED]},
        outcome="failed",
        B=lambda p: [("z", p or ABSENT)],
        O=lambda z: raising() if z < 0 else [("o", z)],
    )
    assert [path[-1][1] for path in result.start_order["O"]] == [0, 2, 3, 4]


def test_row_16_ordered_windows_run_one_after_the_other() -> None:
    holds(
        "p*\nB: p -> z\nO: ordered(window(z, 2)) -> o\nout o = o",
        {"p": [1, 2, 3, 4, 5]},
        {"o": [3, 7, 5]},
        B=lambda p: [("z", p)],
        O=lambda z: [("o", sum(z))],
    )
