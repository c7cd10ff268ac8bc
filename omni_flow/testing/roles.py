"""Roles for the simulator: the user's own classes, functions or tables; stand-ins for all others.

Code that is run here is run to its end at once, in the process of the simulator and without a deployment: `ctx` has
`params`, `seed`, `iteration` and `last_iteration` only.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from omni_flow.control.runtime.methods import Emit
from omni_flow.control.spec import GraphSpec, InterfaceSpec
from omni_flow.testing.facts import Activation, Behave, Given
from omni_flow.testing.standins import stable_hash
from omni_flow.testing.vectors import Table

Override = type | Callable[..., Any] | Sequence[Mapping[str, Any]]
"""A class (for a role), or a function or the rows of a table (for an interface)."""


class UnknownRoleError(LookupError):
    """A role or interface that the graph does not have."""


@dataclass(frozen=True, slots=True)
class SimulatedContext:
    """What a simulated role may know of its activation."""

    params: SimpleNamespace
    seed: int
    iteration: int
    last_iteration: bool


class Roles:
    """Behaviour of a graph's roles, some of them the user's. Call it with an activation.

    Args:
        overrides: by role, a class (made with the role's `init`); by interface, a function that takes the parameters
            and gives what the method would, or the rows of a table (`when`, `give`, `raises`).
        otherwise: the behaviour of all others.

    Raises:
        UnknownRoleError: a key of `overrides` is no role or interface of the graph.
    """

    def __init__(self, spec: GraphSpec, overrides: Mapping[str, Override], otherwise: Behave) -> None:
        self._spec = {interface.name: interface for interface in spec.interfaces}
        self._calls: dict[str, Callable[..., Any]] = {}
        self._tables: dict[str, Table] = {}
        self._otherwise = otherwise
        roles = {role.name: role for role in spec.roles}
        for name, override in overrides.items():
            if name in self._spec and not isinstance(override, type):
                if callable(override):
                    self._calls[name] = override
                else:
                    self._tables[name] = Table({name: override})
            elif name in roles and isinstance(override, type):
                instance = override(**roles[name].init)
                for interface in spec.interfaces:
                    if interface.role == name:
                        self._calls[interface.name] = getattr(instance, interface.method)
            else:
                known = [*roles, *self._spec]
                raise UnknownRoleError(
                    f"graph {spec.name!r} has no {'role' if isinstance(override, type) else 'interface'} {name!r}; "
                    f"name a role for a class, an interface for a function or table, of {sorted(set(known))}"
                )

    def __call__(self, activation: Activation) -> Given:
        name = activation.interface
        table = self._tables.get(name)
        if table is not None:
            return table(activation)
        call = self._calls.get(name)
        if call is None:
            return self._otherwise(activation)
        return _run(self._spec[name], call, activation)


def _run(interface: InterfaceSpec, call: Callable[..., Any], activation: Activation) -> Given:
    """Call role code and collect what it gives; what it raises is what a role raises."""
    gives: list[tuple[str, Any]] = []
    try:
        arguments: list[Any] = []
        if next(iter(inspect.signature(call).parameters), None) == "ctx":
            seed = stable_hash((activation.interface, activation.path))
            params = SimpleNamespace(**activation.params)
            arguments.append(SimulatedContext(params, seed, activation.iteration, activation.last_iteration))
        result = call(*arguments, **activation.inputs)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if inspect.isasyncgen(result):
            asyncio.run(_drain(interface, result, gives))
        elif inspect.isgenerator(result):
            for item in result:
                gives += _yielded(interface, item)
        else:
            gives += _returned(interface, result)
    except Exception:  # a role may raise anything: in the control flow that is a failed activation
        return Given(gives, raises=True)
    return Given(gives)


async def _awaited(result: Any) -> Any:
    return await result


async def _drain(interface: InterfaceSpec, items: AsyncIterator[Any], gives: list[tuple[str, Any]]) -> None:
    async for item in items:
        gives += _yielded(interface, item)


def _returned(interface: InterfaceSpec, result: Any) -> Iterator[tuple[str, Any]]:
    if len(interface.outputs) == 1:
        yield interface.outputs[0].name, result
    elif interface.outputs:
        yield from result.items()


def _yielded(interface: InterfaceSpec, item: Any) -> list[tuple[str, Any]]:
    if isinstance(item, Emit):
        return list(item.values.items())
    return [(interface.outputs[0].name, item)]
