"""Findings about types: what a slot receives against the annotation of the parameter that it is bound to."""

from __future__ import annotations

from collections.abc import Iterator

from omni_flow.control.findings import Finding
from omni_flow.control.fits import fits
from omni_flow.control.lint.roles import call_name
from omni_flow.control.signatures import element, role_class, signature_of
from omni_flow.control.spec import FieldRef, GraphSpec, InterfaceSpec, Join, ParamRef, SlotSpec
from omni_flow.control.types import Anything, ListOf, Scalar, Type

LISTS = (Join.COLLECT, Join.COUNT, Join.WINDOW)


def check(spec: GraphSpec) -> Iterator[Finding]:
    """`type-mismatch` for parameters, batches, back edges and thresholds; a note for annotations that say nothing."""
    fields = field_types(spec)
    roles = {role.name: role for role in spec.roles}
    for interface in spec.interfaces:
        role = roles.get(interface.role)
        cls = role_class(role.factory) if role is not None else None
        signature = None if cls is None else signature_of(cls, interface.method)
        for group in interface.groups:
            for slot in group:
                yield from _threshold(spec, fields, slot, interface)
        if signature is None:
            continue
        if signature.unresolved:
            yield Finding(
                "unresolved-annotation",
                f"{call_name(interface)}: annotations could not be evaluated, so their types are not checked: "
                f"{', '.join(map(repr, signature.unresolved))}",
                "import what they name outside of TYPE_CHECKING",
                interface.where,
                "note",
            )
        told: set[tuple[str, str]] = set()
        for group in interface.groups:
            for slot in group:
                parameter = signature.parameter(slot.param)
                if parameter is None or (slot.field, slot.param) in told:
                    continue
                told.add((slot.field, slot.param))
                yield from _parameter(spec, fields, slot, parameter.type, interface)
        yield from _batched_result(interface, signature.result)


def field_types(spec: GraphSpec) -> dict[str, Type | None]:
    """The declared type of each field; of a stream, that of a frame."""
    found: dict[str, Type | None] = {p.name: p.type for p in spec.placeholders}
    found |= {o.field: o.type for i in spec.interfaces for o in i.outputs}
    return found


def received(slot: SlotSpec, type_: Type | None) -> Type | None:
    """What the parameter of a slot gets when its field is of `type_`."""
    return ListOf(type_ or Anything()) if slot.join in LISTS else type_


def _parameter(
    spec: GraphSpec, fields: dict[str, Type | None], slot: SlotSpec, want: Type | None, interface: InterfaceSpec
) -> Iterator[Finding]:
    source = spec.feedback.get(slot.field, slot.field)
    have = received(slot, fields.get(source or ""))
    if interface.batch is not None:
        have = ListOf(have or Anything())
    if not fits(have, want):
        hint = "put a role between them that converts, or change the annotation"
        if interface.batch is not None and element(want) is None:
            hint = f"a batched method receives lists: annotate it list[{want}]"
        elif slot.join not in LISTS and element(want) is not None and fits(have, element(want)):
            hint = f"collect({slot.field}), count or window make a list of a stream; else annotate one value"
        yield Finding(
            "type-mismatch",
            f"{call_name(interface)}: parameter {slot.param!r} is {want}, but {slot.field!r} gives {have}",
            hint,
            slot.where or interface.where,
        )


def _batched_result(interface: InterfaceSpec, result: Type | None) -> Iterator[Finding]:
    if interface.batch is not None and not fits(ListOf(Anything()), result):
        yield Finding(
            "type-mismatch",
            f"{call_name(interface)} is batched, but returns {result}",
            f"return a list with one result per item: list[{result}]",
            interface.where,
        )


def _threshold(
    spec: GraphSpec, fields: dict[str, Type | None], slot: SlotSpec, interface: InterfaceSpec
) -> Iterator[Finding]:
    if slot.join is not Join.COUNT:
        return
    name, have = "", None
    if isinstance(slot.n, FieldRef):
        name, have = slot.n.name, fields.get(slot.n.name)
    elif isinstance(slot.n, ParamRef):
        name = slot.n.name
        have = next((p.type for p in spec.params if p.name == name), None)
    if have is not None and not fits(have, Scalar(int)):
        yield Finding(
            "type-mismatch",
            f"{interface.name!r}: count({slot.field}, n) takes n from {name!r}, which is {have}, not int",
            "take n from an int",
            slot.where or interface.where,
        )
