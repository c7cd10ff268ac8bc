"""Every lint finding about scopes, loops, joins and windows, with its exact words."""

from __future__ import annotations

import pytest

from omni_flow.control.compile import compile_spec, lint_spec
from omni_flow.control.findings import GraphError
from omni_flow.control.spec import FieldRef, GraphSpec, Join, ParamRef, UseSpec

from .build import collect, count, graph, interface, last, optional, slot, window


class Chunks:
    """A window policy of at most 100 frames."""

    max_frames = 100

    def cut(self, frames: object, start: int, ended: bool) -> int | None:
        return start + 100

    def __repr__(self) -> str:
        return "Chunks()"


STREAM = interface("A", [["p"]], "y*")
LOOP = interface("H", [["p"], ["fb"]], "x", max_iters=3)

CASES: list[tuple[GraphSpec, str, str, str]] = [
    (
        graph("p", interface("A", [["p"]], "x"), interface("B", [["p"]], "x")),
        "two-producers",
        "field 'x' is produced by 'B' and by 'A'",
        "give one of the two outputs another name",
    ),
    (
        graph("p", interface("A", [["p", "b"]], "a"), interface("B", [["a"]], "b")),
        "cycle",
        "A -> B -> A is a cycle without a feedback",
        "declare one of these edges as graph.feedback(name) and bind it",
    ),
    (
        graph("p", interface("A", [["p"], []], "a")),
        "empty-group",
        "group 1 of 'A' has no slot",
        "remove the group or list what it needs",
    ),
    (
        graph("p", interface("H", [["fb", "p"]], "x", max_iters=2), feedback={"fb": "x"}),
        "head-without-entry",
        "'H' reads a feedback in each of its groups, so its loop can never begin",
        "add a group without the feedback: it is what iteration 0 runs on",
    ),
    (
        graph("p", STREAM, interface("B", [["y"], ["p"]], "b")),
        "group-scopes",
        "groups 0 and 1 of 'B' have different scopes: (y) and ()",
        "close the longer one with collect, count, last or window, or use two interfaces",
    ),
    (
        graph("p", STREAM, interface("H", [["p"], ["fb", "y"]], "x", max_iters=2), feedback={"fb": "x"}),
        "group-scopes",
        "group 1 of the loop head 'H' reads scope (y), which is not visible where the loop is entered, at ()",
        "let the other slots of a feedback group be fields that the loop is entered with",
    ),
    (
        graph("p", STREAM, interface("B", [["p"]], "z*"), interface("J", [["y", "z"]], "j")),
        "incomparable-scopes",
        "group 0 of 'J' reads 'y' in scope (y) and 'z' in scope (z): neither is a prefix of the other, so their "
        "numbers don't belong together",
        "close one of them: collect(z), count(z, n), last(z) or window(z, ...)",
    ),
    (
        graph("p", interface("A", [["q"]], "a")),
        "unknown-field",
        "'A' reads 'q', which nothing produces",
        "name a placeholder or an output of an interface",
    ),
    (
        graph("p", interface("A", [[window("p")]], "a")),
        "window-outside-stream",
        "'A' windows 'p', which is not inside any stream or loop",
        "read it plainly, without window",
    ),
    (
        graph("p", STREAM, interface("B", [[collect("y", levels=2)]], "b")),
        "join-outside-stream",
        "'B' reads collect(y) over 2, but its scope is (y)",
        "read it plainly, or close at most as many levels as the scope has",
    ),
    (
        graph("p", interface("A", [["p", slot("p", param="p")]], "a")),
        "duplicate-parameter",
        "group 0 of 'A' binds parameter 'p' twice",
        "bind each parameter once; dict(other=field) names another parameter",
    ),
    (
        graph("p q", interface("A", [["p"], ["p", "q"]], "a")),
        "shadowed-group",
        "group 1 of 'A' can never run: group 0 before it needs no more",
        "declare the richer group first; groups are tried in declared order",
    ),
    (
        graph("p q", interface("A", [["p", optional("q")], ["p", "q"]], "a")),
        "shadowed-group",
        "group 1 of 'A' can never run: group 0 before it needs no more",
        "declare the richer group first; groups are tried in declared order",
    ),
    (
        graph("p", STREAM, interface("W", [[window("y"), window("y", 3, param="other")]], "w")),
        "two-windows",
        "'W' has 2 window slots",
        "cut each stream in an interface of its own",
    ),
    (
        graph("p q", STREAM, interface("W", [[window("y")], ["q"]], "w")),
        "window-with-groups",
        "'W' has a window and 2 groups",
        "an interface with a window has one group; put the alternatives into another interface",
    ),
    (
        graph("p", STREAM, interface("H", [[window("y")], ["fb"]], "x", max_iters=2), feedback={"fb": "x"}),
        "window-at-head",
        "'H' is the head of a loop and windows 'y'",
        "cut the stream in an interface before the loop",
    ),
    (
        graph("p", STREAM, interface("W", [[window("y", 0, stride=1)]], "w")),
        "window-shape",
        "'W': window(y) has size 0, stride 1, left_context 0",
        "size and stride are at least 1, left_context at least 0",
    ),
    (
        graph("p", STREAM, interface("W", [[window("y", 100, policy=Chunks())]], "w")),
        "window-exceeds-credit",
        "'W': a window of 'y' may hold 100 frames, but only 64 numbers may be open",
        "lower max_frames + left_context to 64, or raise the graph's credit",
    ),
    (
        graph("p", STREAM, interface("H", [[slot("y", ordered=True)], ["fb"]], "x", max_iters=2), feedback={"fb": "x"}),
        "ordered-at-head",
        "'H' is the head of a loop and reads ordered(y)",
        "order the stream in an interface before the loop; a loop's iterations are in order anyway",
    ),
    (
        graph("p", interface("A", [[slot("p", ordered=True)]], "a")),
        "ordered-outside-stream",
        "'A' reads ordered(p), but 'p' is not inside any stream",
        "read it plainly",
    ),
    (
        graph("p", STREAM, interface("B", [[count("y", ParamRef("n"))]], "b")),
        "unknown-param",
        "'B': count(y, n) takes n from param 'n', which is not declared",
        "declare it: graph.param('n', int, default)",
    ),
    (
        graph("p", STREAM, interface("B", [[count("y", FieldRef("y"))]], "b")),
        "n-not-visible",
        "'B': n of count(y, n) is 'y' in scope (y), which is not visible in the slot's scope ()",
        "take n from a field of the slot's scope or an outer one",
    ),
    (
        graph("p", STREAM, interface("B", [[count("y", FieldRef("no"))]], "b")),
        "unknown-field",
        "'B' takes the n of count(y, n) from 'no', which nothing produces",
        "name a placeholder or an output of an interface",
    ),
    (
        graph("p", interface("H", [["p"], ["fb"]], "x"), feedback={"fb": "x"}),
        "head-without-max-iters",
        "'H' is the head of a loop without max_iters",
        "say max_iters=N (at least 1): it bounds the loop and its memory",
    ),
    (
        graph("p", interface("H", [["p"], [last("fb")]], "x", max_iters=2), feedback={"fb": "x"}),
        "feedback-join",
        "'H' reads the feedback 'fb' through a join",
        "a feedback slot reads the bound field's value of the iteration before; join inside the loop's body",
    ),
    (
        graph("p", LOOP, interface("B", [["x", last("x", param="end")]], "b"), feedback={"fb": "b"}),
        "own-end",
        "feedback 'fb' of 'H' depends on 'B', which waits for the end of this very loop",
        "feed back a field of the iteration; close the loop only outside it",
    ),
    (
        graph("p", LOOP, feedback={"fb": None}),
        "unbound-feedback",
        "feedback 'fb' is never bound",
        "call .bind(field) with the field whose value goes back",
    ),
    (
        graph("p", LOOP, feedback={"fb": "p"}),
        "feedback-scope",
        "feedback 'fb' of 'H' is bound to 'p' in scope (), but the loop's iterations are (H@loop)",
        "bind a field with one value in each iteration; close inner streams with last, collect or count",
    ),
    (
        graph("p", STREAM, outputs={"o": window("y")}),
        "output-window",
        "output 'o' is a window; only an interface cuts a stream",
        "give the field itself, or collect, count or last of it",
    ),
    (
        graph("p", STREAM, outputs={"o": collect("p")}),
        "join-outside-stream",
        "output 'o' reads collect(p) over 1, but its scope is ()",
        "give the field itself, or close at most as many levels as the scope has",
    ),
    (
        graph("p", STREAM, outputs={"o": "nothing"}),
        "unknown-field",
        "output 'o' is 'nothing', which nothing produces",
        "name a placeholder or an output of an interface",
    ),
    (
        graph("p", STREAM, uses=[UseSpec("u", "other", {}, unbound=("q",))]),
        "use-unbound",
        "use 'u' of graph 'other' leaves its placeholder 'q' unbound",
        "add 'q' to bind=",
    ),
    (
        graph("p", STREAM, uses=[UseSpec("u", "other", {}, streamed=("mic",))]),
        "use-streamed",
        "use 'u' of graph 'other' has the streamed placeholder 'mic', which can't be bound",
        "inline a graph without streamed placeholders; stream into the outer graph and bind a field",
    ),
]


@pytest.mark.parametrize(("spec", "code", "what", "mend"), CASES, ids=[f"{k}-{c[1]}" for k, c in enumerate(CASES)])
def test_a_graph_that_cannot_work_is_refused_with_place_and_mend(
    spec: GraphSpec, code: str, what: str, mend: str
) -> None:
    findings = {f.code: f for f in lint_spec(spec)}
    assert (findings[code].what, findings[code].mend) == (what, mend)
    with pytest.raises(GraphError) as caught:
        compile_spec(spec)
    assert code in {f.code for f in caught.value.findings}


def test_all_findings_come_at_once() -> None:
    spec = graph("p", interface("A", [["q"], []], "a"), interface("B", [[slot("p", ordered=True)]], "b"))
    assert {f.code for f in lint_spec(spec)} == {"unknown-field", "empty-group", "ordered-outside-stream"}


def test_a_window_of_a_loop_closed_in_its_own_body_is_own_end() -> None:
    windows = interface("W", [[window("x")]], "w")
    body = interface("B", [["x", collect("w")]], "b")
    spec = graph("p", LOOP, windows, body, feedback={"fb": "b"})
    assert {f.code for f in lint_spec(spec)} == {"own-end"}


def test_an_inner_loop_may_be_closed_in_the_outer_ones_body() -> None:
    outer = interface("H", [["p"], ["fb"]], "a", max_iters=3)
    inner = interface("K", [["a"], ["gb"]], "b c", max_iters=4)
    close = interface("R", [[last("c")]], "r")
    spec = graph("p", outer, inner, close, outputs={"o": "r"}, feedback={"fb": "r", "gb": "b"})
    assert lint_spec(spec) == []


def test_credit_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="credit is 0; a creator needs at least one open number"):
        compile_spec(graph("p", STREAM, outputs={"o": "y"}), credit=0)


def test_join_kinds_print_as_the_dsl_writes_them() -> None:
    assert [str(j) for j in Join] == ["plain", "collect", "count", "last", "window"]
