"""What the tests of this folder share: a graph holds if reference and simulator agree on what is expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_flow.control.compile import compile_spec
from omni_flow.control.findings import GraphError
from omni_flow.control.spec import GraphSpec
from omni_flow.testing.facts import Given, Result, show_path
from omni_flow.testing.notation import parse_graph
from omni_flow.testing.reference import interpret
from omni_flow.testing.schedule import Faults
from omni_flow.testing.simulate import Report, simulate
from omni_flow.testing.standins import Functions

FAILED = object()
"""Stands at the end of an expected output that ends in a failure."""

Role = Callable[..., Given | Sequence[tuple[str, Any]]]


def raising(*gives: tuple[str, Any]) -> Given:
    """A role that gives this and raises then."""
    return Given(gives, raises=True)


def frames(name: str, *values: Any) -> list[tuple[str, Any]]:
    """A stream of these values."""
    return [(name, value) for value in values]


def holds(
    graph: str | GraphSpec,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Sequence[Any]],
    *,
    outcome: str = "done",
    runs: Mapping[str, Sequence[str]] | None = None,
    params: Mapping[str, Any] | None = None,
    schedules: int = 60,
    faults: Faults | None = None,
    **roles: Role,
) -> tuple[Result, Report]:
    """Assert outputs, outcome and the paths of activations, in the reference and under random schedules."""
    spec = parse_graph(graph) if isinstance(graph, str) else graph
    behave = Functions(**roles)
    result = interpret(spec, inputs, params, behave)
    expected = {
        name: ([value for value in values if value is not FAILED], FAILED in values) for name, values in outputs.items()
    }
    assert {name: (list(d.values), d.failed) for name, d in result.outputs.items()} == expected
    assert result.outcome == outcome
    for interface, paths in (runs or {}).items():
        assert [show_path(path) for name, path in result.runs if name == interface] == list(paths)
    report = simulate(spec, schedules=schedules, inputs=inputs, params=params, roles=behave, faults=faults or Faults())
    assert not report.divergences, report.show()
    return result, report


def errors(graph: str | GraphSpec) -> list[str]:
    """The codes of what lint refuses in a graph."""
    try:
        compile_spec(parse_graph(graph) if isinstance(graph, str) else graph)
    except GraphError as error:
        return [finding.code for finding in error.findings if finding.level == "error"]
    return []
