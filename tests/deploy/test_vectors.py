"""Every test vector of the control flow through real processes, two replicas of each role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omni_flow import Context, RequestFailed, emit
from omni_flow.control.compile import compile_spec
from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.spec import GraphSpec, RoleSpec
from omni_flow.testing.facts import Activation
from omni_flow.testing.vectors import Vector, load_vectors

from .conftest import deployed

VECTORS = load_vectors(Path(__file__).parents[1] / "vectors" / "control_flow.json")


def role_of(vector: Vector, spec: RoleSpec) -> type:
    """A role class whose methods give what the vector's tables say."""

    def method(interface: str) -> Any:
        async def run(self: object, ctx: Context, **inputs: Any) -> AsyncIterator[Any]:
            given = vector.tables(Activation(interface, (), 0, inputs, vars(ctx.params)))
            for name, value in given.gives:
                yield emit(**{name: value})
            if given.raises:
                raise RuntimeError("as the table says")

        return run

    names = {i.method: i.name for i in vector.spec.interfaces if i.role == spec.name}
    return type("Tables", (), {name: method(interface) for name, interface in names.items()})


def graph_of(vector: Vector) -> CompiledGraph:
    spec: GraphSpec = vector.spec
    roles = tuple(replace(role, factory=role_of(vector, role), replicas=2) for role in spec.roles)
    plan = compile_spec(replace(spec, roles=roles))
    return CompiledGraph(spec.name, plan.spec, plan)


async def run(vector: Vector) -> tuple[str, dict[str, list[Any]], set[str]]:
    """The outcome, the values of each output and the failed outputs."""
    graph = graph_of(vector)
    streamed = {p.name for p in vector.spec.placeholders if p.stream}
    async with deployed(graph, memory=None) as app:  # type: ignore[arg-type]
        single = {k: v for k, v in vector.inputs.items() if k not in streamed and v is not None}
        request = await app.submit(params=dict(vector.params), **single)
        values: dict[str, list[Any]] = {name: [] for name in vector.spec.outputs}
        for name in streamed:
            for frame in vector.inputs.get(name) or []:
                await request.send(name, frame)
            await request.end(name)
        async with asyncio.timeout(20):
            async for name, value in request:
                values[name].append(value)
        try:
            await request.result()
        except RequestFailed as failed:
            return str(failed.outcome), values, set(failed.failures)
        return "done", values, set()


@pytest.mark.parametrize("vector", [v for v in VECTORS if "lint" not in v.expect], ids=lambda v: v.name)
def test_a_vector_holds_between_processes(vector: Vector) -> None:
    outcome, values, failures = asyncio.run(run(vector))
    allowed = vector.expect.get("any_of") or [vector.expect]
    found = []
    for expected in allowed:
        wanted = {name: given["values"] for name, given in expected["outputs"].items()}
        failing = {name for name, given in expected["outputs"].items() if given["failed"]}
        found.append((expected.get("outcome", outcome), wanted, failing))
    assert (outcome, values, failures) in found
