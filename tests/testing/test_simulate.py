"""The real core under random schedules agrees with the reference: every vector, and random graphs."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_flow.control.compile import compile_spec
from omni_flow.control.findings import GraphError
from omni_flow.testing.generate import Drawn, drawn_graphs, random_request
from omni_flow.testing.notation import parse_graph
from omni_flow.testing.schedule import Faults
from omni_flow.testing.simulate import Report, Request, simulate
from omni_flow.testing.standins import Functions, Standins
from omni_flow.testing.vectors import Vector, load_vectors

VECTORS = load_vectors(Path(__file__).parents[1] / "vectors" / "control_flow.json")


@pytest.mark.parametrize("vector", [v for v in VECTORS if "lint" not in v.expect], ids=lambda vector: vector.name)
def test_vector_holds_under_random_schedules(vector: Vector) -> None:
    report = simulate(
        vector.spec, schedules=200, inputs=vector.inputs, params=vector.params, roles=vector.tables, seed=1
    )
    assert not report.divergences, report.show()


@pytest.mark.parametrize("vector", [v for v in VECTORS if "lint" in v.expect], ids=lambda vector: vector.name)
def test_vector_is_refused_by_lint(vector: Vector) -> None:
    with pytest.raises(GraphError) as caught:
        compile_spec(vector.spec)
    assert [finding.code for finding in caught.value.findings] == [vector.expect["lint"]]


@settings(max_examples=150, deadline=None)
@given(drawn_graphs(), st.integers(0, 2**32))
def test_random_graphs_agree_with_the_reference_under_random_schedules(drawn: Drawn, seed: int) -> None:
    behave = Standins(drawn.spec, seed)
    report = simulate(drawn.spec, schedules=4, inputs=drawn.inputs, params=drawn.params, roles=behave, seed=seed)
    assert not report.divergences, report.show()


def test_two_thousand_pairs_of_seeded_graphs_hold_every_fault() -> None:
    report = Report("many", 0)
    for seed in range(500):
        drawn = random_request(Random(seed))
        request = Request(compile_spec(drawn.spec), drawn.spec, drawn.inputs, drawn.params, Standins(drawn.spec, seed))
        for number in range(4):
            request.run(1000 * seed + number, number, Faults(), report)
    assert not report.divergences, report.show()
    assert set(report.outcomes) == {"done", "failed", "cancelled", "deadline"}
    assert min(report.deaths, report.duplicates, report.batched, report.absent, report.failed) > 100


def test_a_failing_seed_is_run_alone_again() -> None:
    graph = parse_graph("p\nA: p -> y*\nB: y -> z\nout o = z")
    whole = simulate(graph, schedules=20, seed=9)
    alone = simulate(graph, schedules=20, seed=9, only=13)
    assert alone.schedules == 1
    assert whole.schedules == 20
    assert alone.active <= whole.active


def test_interfaces_that_never_ran_are_named_and_the_report_is_not_ok() -> None:
    graph = parse_graph("p\nA: p -> a\nB: a -> b\nout o = b")
    report = simulate(graph, schedules=10, inputs={"p": 1}, roles=Functions(A=lambda p: []))
    assert report.idle == {"B"}
    assert not report.ok
    assert "never active: B" in report.show()


def test_a_role_is_asked_once_for_an_activation_so_one_that_is_no_function_does_no_harm() -> None:
    graph = parse_graph("p*\nA: p -> a\nout o = a")
    drawn = Random(0)
    report = simulate(graph, schedules=10, inputs={"p": [1, 1]}, roles=Functions(A=lambda p: [("a", drawn.random())]))
    assert not report.divergences, report.show()
