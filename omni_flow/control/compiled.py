"""`CompiledGraph`: a validated graph, immutable, ready to be run, simulated, explained or drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from omni_flow.control.compile import DEFAULT_CREDIT, compile_spec, lint_spec
from omni_flow.control.findings import Finding, GraphError
from omni_flow.control.lint import names, notes, reach, roles, types
from omni_flow.control.lowering import lower
from omni_flow.control.plan import Plan
from omni_flow.control.spec import GraphSpec, InterfaceSpec, ParamSpec, PlaceholderSpec, RoleSpec

if TYPE_CHECKING:
    from omni_flow.control.graph import Graph


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """What `Graph.compile()` returns. `plan` is what replicas run by; `notes` are findings that are no errors."""

    name: str
    spec: GraphSpec
    plan: Plan
    notes: tuple[Finding, ...] = ()

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        """Roles by name, in declared order."""
        return MappingProxyType({role.name: role for role in self.spec.roles})

    @property
    def interfaces(self) -> Mapping[str, InterfaceSpec]:
        """Interfaces by name, in declared order; those of used graphs come after."""
        return MappingProxyType({interface.name: interface for interface in self.spec.interfaces})

    @property
    def placeholders(self) -> Mapping[str, PlaceholderSpec]:
        """What a request may send, by name."""
        return MappingProxyType({placeholder.name: placeholder for placeholder in self.spec.placeholders})

    @property
    def params(self) -> Mapping[str, ParamSpec]:
        """Global parameters by name."""
        return MappingProxyType({param.name: param for param in self.spec.params})

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what the client receives, in declared order."""
        return tuple(self.spec.outputs)


@dataclass(frozen=True, slots=True)
class Examined:
    """A lowered graph with all that lint says of it; `plan` is None if any finding is an error."""

    spec: GraphSpec
    plan: Plan | None
    findings: tuple[Finding, ...]


def examine(graph: Graph, credit: int = DEFAULT_CREDIT) -> Examined:
    """Lower, lint and, if nothing is wrong, compile. Raises `GraphError` only if graphs use each other in a circle."""
    lowered = lower(graph)
    spec = lowered.spec
    found = [*lowered.findings, *names.check(spec)]
    foreign = {f.where for f in found if f.code == "foreign-field"}
    twice = any(f.code == "duplicate-name" for f in found)
    for finding in lint_spec(spec, credit):
        # The same mistake seen from below: a foreign field has no producer, a name declared twice has two.
        echo = (finding.code == "unknown-field" and finding.where in foreign) or (
            finding.code == "two-producers" and twice
        )
        if not echo:
            found.append(finding)
    found += [*reach.check(spec), *roles.check(spec), *types.check(spec), *notes.check(spec)]
    plan = None
    if not any(f.level == "error" for f in found):
        plan = compile_spec(spec, credit)
        found += notes.check_plan(plan)
    return Examined(spec, plan, tuple(dict.fromkeys(found)))


def compile_graph(graph: Graph, credit: int = DEFAULT_CREDIT) -> CompiledGraph:
    """What `Graph.compile` does. Raises `GraphError` with every error found."""
    examined = examine(graph, credit)
    if examined.plan is None:
        raise GraphError(graph.name, [f for f in examined.findings if f.level == "error"])
    return CompiledGraph(graph.name, examined.spec, examined.plan, examined.findings)
