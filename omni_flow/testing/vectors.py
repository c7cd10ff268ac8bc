"""The neutral JSON form of a graph, and the test vectors written in it.

A vector is a graph, the inputs of one request, the behaviour of every interface as a table, and what must come out:
outputs, outcome and activations, or the code of the lint error. The file describes its own form under `graph_form` and
`format`; `graph_from_json` reads that form and inlines its `uses`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from omni_flow.control.spec import (
    Count,
    FieldRef,
    GraphSpec,
    InterfaceSpec,
    Join,
    OutputSpec,
    ParamRef,
    ParamSpec,
    PlaceholderSpec,
    RoleSpec,
    SlotSpec,
    UseSpec,
)
from omni_flow.testing.facts import Activation, Given


class UnknownInputsError(LookupError):
    """A table has no row for the inputs an interface was given. Add the row, or find out why it ran with them."""


@dataclass(frozen=True, slots=True)
class Vector:
    """One test vector. `inputs` is None where the graph must be refused; `expect` is as in the file."""

    name: str
    why: str
    spec: GraphSpec
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]
    tables: Table
    expect: Mapping[str, Any]


class Table:
    """Role behaviour as rows: interface → the row whose `when` equals the given inputs says what is given.

    Absent optional inputs are left out of `when`. Instances are called as the reference and the simulator call a role.
    The completion of an interface without outputs, which the file writes as a value of `I.done`, is no output of a role
    and is left out.
    """

    def __init__(self, rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        self._rows: dict[str, dict[str, Given]] = {
            interface: {
                _key(row["when"]): Given(
                    gives=tuple((name, value) for name, value in row["give"] if name != f"{interface}.done"),
                    raises=bool(row.get("raises", False)),
                )
                for row in table
            }
            for interface, table in rows.items()
        }

    def __call__(self, activation: Activation) -> Given:
        """What the interface gives for these inputs.

        Raises:
            UnknownInputsError: no row has these inputs.
        """
        rows = self._rows.get(activation.interface, {})
        given = rows.get(_key(activation.inputs))
        if given is None:
            raise UnknownInputsError(f"{activation.interface}: no row for inputs {dict(activation.inputs)!r}")
        return given

    def __contains__(self, interface: str) -> bool:
        return interface in self._rows


def load_vectors(file: FilePath) -> list[Vector]:
    """All vectors of a file in the form described by the file itself."""
    document = json.loads(file.read_text())
    return [_vector(entry) for entry in document["vectors"]]


def _vector(entry: Mapping[str, Any]) -> Vector:
    return Vector(
        name=entry["name"],
        why=entry.get("why", ""),
        spec=graph_from_json(entry["graph"], entry["name"]),
        inputs=entry.get("inputs") or {},
        params=entry.get("params") or {},
        tables=Table(entry.get("behaviours") or {}),
        expect=entry["expect"],
    )


def graph_from_json(graph: Mapping[str, Any], name: str = "graph") -> GraphSpec:
    """A graph in the neutral JSON form as a `GraphSpec`, its `uses` inlined (interfaces `u/I`, fields `u.f`).

    Every interface becomes the only one of a role of its own unless it names a `role`; a role named inside a used graph
    is shared by all uses of it.
    """
    interfaces: list[InterfaceSpec] = []
    params: dict[str, Any] = {}
    feedback: dict[str, str | None] = {}
    uses: list[UseSpec] = []
    _inline(graph, "", "", {}, interfaces, params, feedback, uses)
    replicas = graph.get("replicas", {})
    roles = dict.fromkeys(interface.role for interface in interfaces)
    return GraphSpec(
        name=name,
        placeholders=tuple(
            PlaceholderSpec(field, bool(given.get("stream", False)), bool(given.get("required", False)))
            for field, given in graph.get("placeholders", {}).items()
        ),
        params=tuple(ParamSpec(param, default) for param, default in params.items()),
        roles=tuple(RoleSpec(role, replicas=replicas.get(role, 1)) for role in roles),
        interfaces=tuple(interfaces),
        feedback=feedback,
        outputs={output: _slot(slot, {}, "") for output, slot in graph.get("outputs", {}).items()},
        uses=tuple(uses),
    )


def _inline(
    graph: Mapping[str, Any],
    name_prefix: str,
    field_prefix: str,
    bound: Mapping[str, str],
    interfaces: list[InterfaceSpec],
    params: dict[str, Any],
    feedback: dict[str, str | None],
    uses: list[UseSpec],
) -> None:
    params.update(graph.get("params") or {})
    for back, field in (graph.get("feedback") or {}).items():
        feedback[field_prefix + back] = _field(field, bound, field_prefix)
    for use in graph.get("uses") or ():
        inner = use["graph"]
        bind = {placeholder: _field(field, bound, field_prefix) for placeholder, field in use["bind"].items()}
        uses.append(
            UseSpec(
                name=name_prefix + use["as"],
                graph=inner.get("name", use["as"]),
                bind=bind,
                unbound=tuple(p for p in inner["placeholders"] if p not in bind),
                streamed=tuple(p for p, given in inner["placeholders"].items() if given.get("stream")),
            )
        )
        _inline(
            inner,
            f"{name_prefix}{use['as']}/",
            f"{field_prefix}{use['as']}.",
            bind,
            interfaces,
            params,
            feedback,
            uses,
        )
    for entry in graph.get("interfaces", ()):
        interfaces.append(
            InterfaceSpec(
                name=name_prefix + entry["name"],
                role=entry.get("role", name_prefix + entry["name"]),
                method=entry["name"],
                groups=tuple(tuple(_slot(slot, bound, field_prefix) for slot in group) for group in entry["inputs"]),
                outputs=tuple(
                    OutputSpec(out["name"], field_prefix + out["name"], bool(out.get("stream", False)))
                    for out in entry["outputs"]
                ),
                race=bool(entry.get("race", False)),
                max_iters=entry.get("max_iters"),
                retries=entry.get("retries", 0),
                on_error=entry.get("on_error", "fail"),
            )
        )


def _field(field: str, bound: Mapping[str, str], prefix: str) -> str:
    return bound[field] if field in bound else prefix + field


def _slot(slot: Mapping[str, Any], bound: Mapping[str, str], prefix: str) -> SlotSpec:
    join = slot.get("join", "plain")
    return SlotSpec(
        field=_field(slot["field"], bound, prefix),
        param=slot.get("param") or slot["field"],
        optional=bool(slot.get("default", False)),
        join=Join.PLAIN if join == "ordered" else Join(join),
        ordered=join == "ordered" or bool(slot.get("ordered", False)),
        levels=slot.get("levels", 1),
        n=_count(slot.get("n", "all"), bound, prefix),
        size=slot.get("size", 1),
        stride=slot.get("stride", slot.get("size", 1)),
        left=slot.get("left", 0),
    )


def _count(n: Any, bound: Mapping[str, str], prefix: str) -> Count:
    if isinstance(n, Mapping):
        if "param" in n:
            return ParamRef(n["param"])
        return FieldRef(_field(n["field"], bound, prefix))
    if n == "all":
        return "all"
    return int(n)


def _key(inputs: Mapping[str, Any]) -> str:
    return json.dumps(inputs, sort_keys=True)
