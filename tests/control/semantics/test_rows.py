"""The smallest graphs that break without a rule: one test for each row of "why each rule is there".

Each holds in the sequential reference and under random schedules (order, duplicates, deaths, cancels, credit 1 to 3,
1 to 3 shares). Rows that are lint rules are refused. Rows about processes rather than facts (28, and the refusal of
row 19) are held by the tests of the runtime as well.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from holding import FAILED, errors, frames, holds, raising

from omni_flow.control.spec import GraphSpec, InterfaceSpec, Join, OutputSpec, PlaceholderSpec, SlotSpec
from omni_flow.refs import ABSENT
from omni_flow.testing.facts import Given
from omni_flow.testing.schedule import Faults
from omni_flow.testing.standins import HashCut


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
