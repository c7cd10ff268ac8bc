"""From the declarations of a `Graph` to the neutral `GraphSpec`: names, uses inlined, roles and params merged.

Pure. What cannot be said in a `GraphSpec` (a name declared twice in a mapping, a field of a foreign graph, a bind to a
placeholder that does not exist) comes out as findings beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from omni_flow.control.findings import Finding, GraphError
from omni_flow.control.fits import fits
from omni_flow.control.slots import Field, Param, Slot
from omni_flow.control.spec import (
    Count,
    FieldRef,
    GraphSpec,
    InterfaceSpec,
    ParamRef,
    ParamSpec,
    PlaceholderSpec,
    RoleSpec,
    SlotSpec,
    UseSpec,
)

if TYPE_CHECKING:
    from omni_flow.control.graph import Graph, Interface, Use


@dataclass(frozen=True, slots=True)
class Lowered:
    """A spec and what lowering found wrong."""

    spec: GraphSpec
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class _Parts:
    """What is collected for one graph while its uses are inlined."""

    placeholders: list[PlaceholderSpec] = field(default_factory=list)
    params: list[ParamSpec] = field(default_factory=list)
    roles: list[RoleSpec] = field(default_factory=list)
    interfaces: list[InterfaceSpec] = field(default_factory=list)
    feedback: dict[str, str | None] = field(default_factory=dict)
    uses: list[UseSpec] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def lower(graph: Graph, _chain: tuple[Graph, ...] = ()) -> Lowered:
    """The neutral form of a graph, used graphs inlined under their names. Raises `GraphError` if uses go round."""
    if any(outer is graph for outer in _chain):
        way = " -> ".join(repr(g.name) for g in (*_chain, graph))
        finding = Finding("use-cycle", f"graphs use each other in a circle: {way}", "take one use out", graph._where)
        raise GraphError(_chain[0].name, [finding])
    parts = _Parts(findings=list(graph._findings))
    parts.placeholders += [spec for spec, _ in graph._placeholders]
    parts.params += [param.spec for param in graph._params]
    parts.roles += [role._spec for role in graph._roles]
    parts.interfaces += [_interface(graph, interface, parts) for interface in graph._interfaces]
    for declared, place in graph._feedback:
        if declared.id in parts.feedback:
            _duplicate(graph, "feedback", declared.id, place, parts)
        bound = graph._bound.get(declared.id)
        parts.feedback[declared.id] = None if bound is None else _field(graph, bound, place, parts)
    for use in graph._uses:
        _inline(graph, use, lower(use._other, (*_chain, graph)), parts)
    spec = GraphSpec(
        name=graph.name,
        placeholders=tuple(parts.placeholders),
        params=tuple(parts.params),
        roles=tuple(parts.roles),
        interfaces=tuple(parts.interfaces),
        feedback=parts.feedback,
        outputs={name: _slot(graph, name, slot, parts) for name, slot in graph._outputs.items()},
        uses=tuple(parts.uses),
        where=graph._where,
    )
    return Lowered(spec, tuple(dict.fromkeys(parts.findings)))


def _interface(graph: Graph, interface: Interface, parts: _Parts) -> InterfaceSpec:
    groups = tuple(tuple(_slot(graph, param, slot, parts) for param, slot in group) for group in interface._groups)
    return replace(interface._spec, groups=groups)


def _slot(graph: Graph, param: str, slot: Slot, parts: _Parts) -> SlotSpec:
    over = slot.over
    return SlotSpec(
        field=_field(graph, slot.field, slot.where, parts),
        param=param,
        optional=slot.optional,
        join=slot.join,
        ordered=slot.ordered,
        n=_count(graph, slot, parts),
        size=slot.size,
        stride=slot.stride,
        left=slot.left,
        policy=slot.policy,
        where=slot.where,
        over=_field(graph, over, slot.where, parts) if isinstance(over, Field) else over,
    )


def _count(graph: Graph, slot: Slot, parts: _Parts) -> Count:
    n = slot.n
    if isinstance(n, Field):
        return FieldRef(_field(graph, n, slot.where, parts))
    if isinstance(n, Param):
        return ParamRef(n.name)
    if isinstance(n, int):
        return n
    return "all" if n == "all" else ParamRef(n)


def _field(graph: Graph, used: Field, place: str, parts: _Parts) -> str:
    """The field's id; one of another graph gets an id that nothing produces, and a finding."""
    if used.graph is graph:
        return used.id
    what = f"field {used.id!r} belongs to graph {used.graph.name!r}, not to {graph.name!r}"
    mend = "inline that graph with use(...) and read its output from the handle"
    parts.findings.append(Finding("foreign-field", what, mend, place))
    return f"({used.graph.name}){used.id}"


def _inline(graph: Graph, use: Use, inner: Lowered, parts: _Parts) -> None:
    name, spec, place = use._name, inner.spec, use._where
    if any(u.name == name for u in parts.uses):
        _duplicate(graph, "use", name, place, parts)
    parts.findings += inner.findings
    own = {p.name: p for p in spec.placeholders}
    bind = {key: _field(graph, value, place, parts) for key, value in use._bind.items()}
    for key, value in use._bind.items():
        if key not in own:
            known = ", ".join(repr(n) for n in own if "/" not in n) or "none"
            what = f"use {name!r} binds {key!r}, which graph {spec.name!r} does not have as a placeholder"
            parts.findings.append(Finding("unknown-placeholder", what, f"its placeholders: {known}", place))
        elif not fits(value.type, own[key].type):
            what = f"use {name!r} binds {value.type} field {value.id!r} to {own[key].type} placeholder {key!r}"
            parts.findings.append(Finding("type-mismatch", what, "put a role between them that converts", place))

    def rename(field_name: str) -> str:
        return bind[field_name] if field_name in bind and field_name in own else f"{name}/{field_name}"

    # Unbound ones stay as placeholders of their own, so that the only finding about them is the one of the use.
    loose = [p for p in spec.placeholders if p.name not in bind]
    parts.placeholders += [replace(p, name=rename(p.name)) for p in loose]
    parts.params += _merged_params(graph, use, spec, parts)
    roles = _merged_roles(name, spec, parts)
    parts.interfaces += [_renamed(i, name, rename, roles, spec) for i in spec.interfaces]
    parts.feedback |= {rename(k): None if v is None else rename(v) for k, v in spec.feedback.items()}
    inner_loose = {p for u in spec.uses for p in (f"{u.name}/{n}" for n in u.unbound)}
    parts.uses.append(
        UseSpec(
            name,
            spec.name,
            bind,
            unbound=tuple(p.name for p in loose if p.name not in inner_loose),
            streamed=tuple(p.name for p in spec.placeholders if p.stream and p.name not in inner_loose),
            where=place,
        )
    )
    for u in spec.uses:
        parts.uses.append(replace(u, name=f"{name}/{u.name}", bind={k: rename(v) for k, v in u.bind.items()}))


def _merged_params(graph: Graph, use: Use, spec: GraphSpec, parts: _Parts) -> list[ParamSpec]:
    """Params are global: one name, one value. Equal declarations are one, unequal ones a finding."""
    new: list[ParamSpec] = []
    for param in spec.params:
        known = next((p for p in parts.params if p.name == param.name), None)
        if known is None:
            new.append(param)
        elif known.type != param.type or known.default != param.default:
            what = (
                f"param {param.name!r} is {known.type} = {known.default!r} in graph {graph.name!r} "
                f"and {param.type} = {param.default!r} in graph {spec.name!r} (use {use._name!r})"
            )
            parts.findings.append(Finding("param-conflict", what, "rename one, or make them equal", use._where))
    return new


def _merged_roles(use: str, spec: GraphSpec, parts: _Parts) -> Mapping[str, str]:
    """Adds the roles of a used graph; same name, class and init is the same role. Returns old name to new name."""
    names: dict[str, str] = {}
    for role in spec.roles:
        known = next((r for r in parts.roles if r.name == role.name), None)
        if known is None:
            parts.roles.append(role)
            names[role.name] = role.name
        elif known.factory is role.factory and known.init == role.init:
            names[role.name] = known.name
        else:
            names[role.name] = f"{use}/{role.name}"
            parts.roles.append(replace(role, name=names[role.name]))
    return names


def _renamed(
    interface: InterfaceSpec, use: str, rename: Callable[[str], str], roles: Mapping[str, str], spec: GraphSpec
) -> InterfaceSpec:
    sources = {o.field for i in spec.interfaces for o in i.outputs} | {i.name for i in spec.interfaces}

    def slot(s: SlotSpec) -> SlotSpec:
        n = FieldRef(rename(s.n.name)) if isinstance(s.n, FieldRef) else s.n
        over = rename(s.over) if s.over in sources and s.over is not None else s.over
        return replace(s, field=rename(s.field), n=n, over=over)

    return replace(
        interface,
        name=f"{use}/{interface.name}",
        role=roles.get(interface.role, interface.role),
        groups=tuple(tuple(slot(s) for s in group) for group in interface.groups),
        outputs=tuple(replace(o, field=rename(o.field)) for o in interface.outputs),
    )


def _duplicate(graph: Graph, kind: str, name: str, place: str, parts: _Parts) -> None:
    what = f"graph {graph.name!r}: {kind} {name!r} is declared twice"
    parts.findings.append(Finding("duplicate-name", what, "give each its own name", place))
