"""`omni-flow explain`: how a graph will run: where its roles are, how messages travel, what waits for what."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated

import typer

from omni_flow.cli import target
from omni_flow.cli.command import Debug, TargetArgument, guarded
from omni_flow.cli.flags import read_replicas
from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.draw.boxes import join_text
from omni_flow.control.plan import GATEWAY, CreditReader, Interface, Plan, RoleId, Route, Scope

CLIENT = "client"
Row = tuple[str, ...]


class TransportName(StrEnum):
    """The transports between processes; `inproc`: everything in one process."""

    UNIX = "unix"
    IPC = "ipc"
    TCP = "tcp"
    INPROC = "inproc"


@dataclass(frozen=True, slots=True)
class RoleRow:
    """A role and its placement."""

    role: str
    made_by: str
    replicas: int
    placement: str
    balance: str


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """A field on its way from where it is made to one reader. `to` is an interface, or the client."""

    field: str
    to: str
    scope: str
    transport: str
    route: str


@dataclass(frozen=True, slots=True)
class InterfaceRow:
    """An interface: what its paths number, by what its activations are spread, and its groups with their joins."""

    interface: str
    scope: str
    spread: str
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A creator of numbers: how many may be open, who must acknowledge them, and who is not waited for (spooled)."""

    source: str
    kind: str
    under: str
    credit: str
    waits_for: tuple[str, ...]
    spooled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explained:
    """All that `explain` says."""

    graph: str
    roles: tuple[RoleRow, ...]
    interfaces: tuple[InterfaceRow, ...]
    edges: tuple[EdgeRow, ...]
    streams: tuple[StreamRow, ...]


def explain(graph: CompiledGraph, replicas: Mapping[str, int], transport: TransportName) -> Explained:
    """What will run, with `replicas` instead of the declared numbers where given."""
    counts = {role.name: replicas.get(role.name, role.replicas) for role in graph.spec.roles}
    return Explained(
        graph=graph.name,
        roles=tuple(_roles(graph, counts, transport)),
        interfaces=tuple(_interface(graph.plan, interface) for interface in graph.plan.interfaces),
        edges=tuple(_edges(graph.plan, counts, transport)),
        streams=tuple(_streams(graph.plan)),
    )


@guarded
def command(
    name: TargetArgument,
    replicas: Annotated[
        list[str] | None, typer.Option("--replicas", metavar="ROLE=N", help="How many replicas of a role.")
    ] = None,
    transport: Annotated[
        TransportName, typer.Option("--transport", help="Between processes; inproc: everything in one.")
    ] = TransportName.UNIX,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Say where roles run, how each edge travels, scopes, joins, routes, credit and what is not waited for."""
    graph = target.load(name).graph.compile()
    found = explain(graph, read_replicas(graph, replicas or []), transport)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    for title, columns, rows in _tables(found):
        if rows:
            typer.secho(title, bold=True)
            typer.echo(_aligned([columns, *rows]) + "\n")
    for note in graph.notes:
        typer.echo(str(note))


def _tables(found: Explained) -> Iterator[tuple[str, Row, list[Row]]]:
    yield (
        "Roles",
        ("role", "made by", "replicas", "placement", "balance"),
        [(r.role, r.made_by, str(r.replicas), r.placement, r.balance) for r in found.roles],
    )
    yield (
        "Interfaces",
        ("interface", "scope", "spread by", "groups, in the order they are tried"),
        [(i.interface, i.scope, i.spread, "\n".join(i.groups)) for i in found.interfaces],
    )
    yield (
        "Edges",
        ("field", "to", "scope", "transport", "replica"),
        [(e.field, e.to, e.scope, e.transport, e.route) for e in found.edges],
    )
    yield (
        "Streams, windows and loops",
        ("source", "kind", "under", "credit", "waits for", "spooled"),
        [
            (s.source, s.kind, s.under, s.credit, "\n".join(s.waits_for) or "–", "\n".join(s.spooled) or "–")
            for s in found.streams
        ],
    )


def _aligned(rows: list[Row]) -> str:
    """Rows of cells as columns; a cell may have several lines. Never cut to the width of a screen."""
    lines = [line for row in rows for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(len(line[k]) for line in lines) for k in range(len(rows[0]))]
    return "\n".join("  " + "   ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _roles(graph: CompiledGraph, counts: Mapping[str, int], transport: TransportName) -> Iterator[RoleRow]:
    for role in graph.spec.roles:
        init = ", ".join(f"{key}={value!r}" for key, value in role.init.items())
        n = counts[role.name]
        where = "the client's process" if transport is TransportName.INPROC else f"{n} process{'es' if n > 1 else ''}"
        balance = role.balance + (", stateful: one replica per request" if role.stateful else "")
        yield RoleRow(role.name, f"{getattr(role.factory, '__name__', role.factory)}({init})", n, where, balance)


def _interface(plan: Plan, interface: Interface) -> InterfaceRow:
    groups = tuple(
        ", ".join(f"{slot.param} ← {_read(slot.field, join_text(slot))}" for slot in group)
        for group in interface.spec.groups
    )
    spread = _scope(plan, interface.scope[: interface.route]) if interface.route else "request"
    words = [w for w, said in (("ordered", interface.ordered), ("race", interface.race)) if said]
    return InterfaceRow(interface.name, _scope(plan, interface.scope), ", ".join([spread, *words]), groups)


def _read(field: str, join: str) -> str:
    return f"{join} of {field}" if join else field


def _edges(plan: Plan, counts: Mapping[str, int], transport: TransportName) -> Iterator[EdgeRow]:
    shown = [output for output in plan.outputs if not output.hidden]
    for field in plan.fields:
        made_in = None if field.producer == GATEWAY else plan.interfaces[field.producer].role
        scope = _scope(plan, field.scope)
        for route in field.routes:
            for reader in route.interfaces:
                how = _between(plan, made_in, route.role, counts, transport)
                yield EdgeRow(
                    field.name, plan.interfaces[reader].name, scope, how, _route(plan, route, field.scope, counts)
                )
        for output in shown:
            if output.field == field.id:
                yield EdgeRow(field.name, f"{CLIENT}: {output.name}", scope, str(transport), "–")


def _between(
    plan: Plan, made_in: RoleId | None, read_in: RoleId, counts: Mapping[str, int], transport: TransportName
) -> str:
    """The nearest way: within one replica nothing is sent at all."""
    if made_in == read_in:
        alone = counts[plan.roles[read_in].spec.name] == 1
        return "same replica" if alone else f"same replica or {transport}"
    return str(transport)


def _route(plan: Plan, route: Route, scope: Scope, counts: Mapping[str, int]) -> str:
    role = plan.roles[route.role].spec
    if counts[role.name] == 1:
        return "the only one"
    if role.stateful:
        return "one per request"
    if route.everyone:
        return "all of the request's"
    return "one " + " and one ".join(f"per {_scope(plan, scope[:cut])}" for cut in route.cuts)


def _streams(plan: Plan) -> Iterator[StreamRow]:
    for source in plan.sources:
        credit = "max_iters" if source.kind == "loop" else str(max(plan.credit, source.at_least))
        if source.kind != "loop" and not source.readers:
            credit = "not needed"
        yield StreamRow(
            source=source.name,
            kind=source.kind,
            under=_scope(plan, source.scope),
            credit=credit,
            waits_for=tuple(_reader(plan, reader) for reader in source.readers),
            spooled=tuple(_reader(plan, reader) for reader in source.spooled),
        )


def _reader(plan: Plan, reader: CreditReader) -> str:
    if reader.interface == GATEWAY:
        return f"{CLIENT}: {plan.outputs[reader.output].name}"
    return plan.interfaces[reader.interface].name


def _scope(plan: Plan, scope: Scope) -> str:
    return " · ".join(plan.sources[source].name for source in scope) or "request"
