"""Graphs of the notation in the real runtime: role classes that do what a function of the activation says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omni_flow import Context, RequestFailed, emit
from omni_flow.control.compile import compile_spec
from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.spec import GraphSpec, RoleSpec
from omni_flow.deploy.local import AsyncDeployment
from omni_flow.testing.facts import Activation, Behave, Path

WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, the values of each output, and which outputs failed (of a sink's failure: none)."""

    outcome: str
    outputs: Mapping[str, list[Any]]
    failed: frozenset[str]


def path_of(shown: str) -> Path:
    """A path as `ctx.path` has it."""
    return tuple((source, int(number)) for source, number in re.findall(r"(.+?)#(\d+)(?:/|$)", shown))


def role_of(spec: GraphSpec, role: RoleSpec, behave: Behave) -> type:
    """A class whose methods give what `behave` says."""

    def method(interface: str) -> Any:
        async def run(self: object, ctx: Context, **inputs: Any) -> AsyncIterator[Any]:
            given = behave(Activation(interface, path_of(ctx.path), 0, inputs, vars(ctx.params)))
            for name, value in given.gives:
                yield emit(**{name: value})
            if given.raises:
                raise RuntimeError("as the test says")

        return run

    names = {i.method: i.name for i in spec.interfaces if i.role == role.name}
    return type("Behaving", (), {name: method(interface) for name, interface in names.items()})


def real(spec: GraphSpec, behave: Behave, replicas: int = 2) -> CompiledGraph:
    """The graph with classes for its roles, ready to be launched."""
    roles = tuple(replace(role, factory=role_of(spec, role, behave), replicas=replicas) for role in spec.roles)
    plan = compile_spec(replace(spec, roles=roles))
    return CompiledGraph(spec.name, plan.spec, plan)


async def request(
    app: AsyncDeployment, spec: GraphSpec, inputs: Mapping[str, Any], params: Mapping[str, Any] | None = None
) -> Outcome:
    """One request: streamed placeholders are fed while outputs are read."""
    streamed = {p.name for p in spec.placeholders if p.stream}
    single = {name: value for name, value in inputs.items() if name not in streamed and value is not None}
    running = await app.submit(params=dict(params or {}), **single)

    async def feed(name: str) -> None:
        for frame in inputs.get(name) or []:
            await running.send(name, frame)
        await running.end(name)

    feeding = [asyncio.create_task(feed(name)) for name in streamed]
    outputs: dict[str, list[Any]] = {name: [] for name in spec.outputs}
    async with asyncio.timeout(WAIT_S):
        async for name, value in running:
            outputs[name].append(value)
    for task in feeding:
        await task
    try:
        await running.result()
    except RequestFailed as failed:
        return Outcome(str(failed.outcome), outputs, frozenset(failed.failures) & outputs.keys())
    return Outcome("done", outputs, frozenset())
