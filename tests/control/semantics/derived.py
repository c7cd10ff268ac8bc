"""Small graphs with what the semantics say of them, worked out by hand from the text alone.

Each is held against the reference, the simulator and the runtime by `test_derived.py`. Roles give their inputs back in
a form that shows which ones they got; a value that starts with "!" makes the role that reads it raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holding import Role, frames, raising

from omni_flow.testing.facts import Given


@dataclass(frozen=True)
class Case:
    """One request. `outputs`: in delivery order, FAILED at the end of one that fails. `runs`: paths by interface."""

    name: str
    graph: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Sequence[Any]]
    roles: Mapping[str, Role]
    outcome: str = "done"
    runs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)


class Cases(list[Case]):
    """The cases of a module. Call it to add one."""

    def __call__(
        self,
        name: str,
        graph: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Sequence[Any]],
        *,
        outcome: str = "done",
        runs: Mapping[str, Sequence[str]] | None = None,
        params: Mapping[str, Any] | None = None,
        **roles: Role,
    ) -> None:
        self.append(Case(name, graph, inputs, outputs, roles, outcome, runs or {}, params or {}))


def tell(output: str) -> Role:
    """Gives the inputs it got, by name; raises on a value that starts with "!"."""

    def run(**inputs: Any) -> Given | Sequence[tuple[str, Any]]:
        if any(isinstance(value, str) and value.startswith("!") for value in inputs.values()):
            return raising()
        return [(output, dict(sorted(inputs.items())))]

    return run


def same(output: str) -> Role:
    """Gives its one input: absent for None; raises on one that starts with "!"."""

    def run(**inputs: Any) -> Given | Sequence[tuple[str, Any]]:
        (value,) = inputs.values()
        if isinstance(value, str) and value.startswith("!"):
            return raising()
        return [] if value is None else [(output, value)]

    return run


def spread(output: str) -> Role:
    """A stream of the elements of its one input; a "!" among them: raises there."""

    def run(**inputs: Any) -> Given | Sequence[tuple[str, Any]]:
        (values,) = inputs.values()
        if "!" in values:
            return raising(*frames(output, *values[: values.index("!")]))
        return frames(output, *values)

    return run


Q = {"q": 0}
