"""The sequential reference gives what the test vectors say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_flow.testing.facts import Result, show_path
from omni_flow.testing.reference import interpret
from omni_flow.testing.vectors import Vector, load_vectors

VECTORS = load_vectors(Path(__file__).parents[1] / "vectors" / "control_flow.json")
RUNNING = [vector for vector in VECTORS if "lint" not in vector.expect]


def printed(result: Result) -> dict[str, Any]:
    return {
        "outcome": result.outcome,
        "outputs": {
            name: {"values": list(delivered.values), "failed": delivered.failed}
            for name, delivered in result.outputs.items()
        },
    }


@pytest.mark.parametrize("vector", RUNNING, ids=lambda vector: vector.name)
def test_vector_holds_in_the_reference(vector: Vector) -> None:
    result = interpret(vector.spec, vector.inputs, vector.params, vector.tables)
    if "any_of" in vector.expect:
        found = [
            printed(interpret(vector.spec, vector.inputs, vector.params, vector.tables, {("Llm", ()): group}))
            for group in (0, 1)
        ]
        assert found == vector.expect["any_of"]
        return
    assert printed(result) == {key: vector.expect[key] for key in ("outcome", "outputs")}
    runs = {(interface, show_path(path), run.group) for (interface, path), run in result.runs.items()}
    assert runs == {tuple(run) for run in vector.expect["runs"]}
    for interface, order in vector.expect.get("start_order", {}).items():
        assert [show_path(path) for path in result.start_order[interface]] == order


def test_all_33_vectors_are_read() -> None:
    assert len(VECTORS) == 33
    assert sum("lint" in vector.expect for vector in VECTORS) == 3
