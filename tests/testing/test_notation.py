"""Graphs written as text mean what they say."""

from __future__ import annotations

import pytest

from omni_flow.control.spec import FieldRef, Join, ParamRef, SlotSpec
from omni_flow.testing.notation import NotationError, parse_graph


def test_every_construct_of_the_notation_is_read() -> None:
    spec = parse_graph(
        """
        p, q*
        param n = 2
        A: p -> y*, x
        J: [[count(y, param.n), optional(p)], [bind(other, p)]] -> o | on_error=absent retries=2 role=r
        W: ordered(window(y, 3, left=1)), count(q, x) -> w
        H: [[p], [fb]] -> h | max_iters=3 race
        feedback fb = h
        out all = collect(w)
        """
    )
    j, w, h = spec.interfaces[1:]
    assert [p.stream for p in spec.placeholders] == [False, True]
    assert [(o.name, o.stream) for o in spec.interfaces[0].outputs] == [("y", True), ("x", False)]
    assert j.groups[0] == (SlotSpec("y", "y", join=Join.COUNT, n=ParamRef("n")), SlotSpec("p", "p", optional=True))
    assert j.groups[1] == (SlotSpec("p", "other"),)
    assert (j.on_error, j.retries, j.role) == ("absent", 2, "r")
    assert w.groups[0][0] == SlotSpec("y", "y", join=Join.WINDOW, ordered=True, size=3, stride=3, left=1)
    assert w.groups[0][1].n == FieldRef("x")
    assert (h.max_iters, h.race) == (3, True)
    assert spec.feedback == {"fb": "h"}
    assert spec.outputs["all"].join is Join.COLLECT


def test_a_line_that_is_no_graph_is_named() -> None:
    with pytest.raises(NotationError, match="A: 7"):
        parse_graph("A: 7 -> x")
