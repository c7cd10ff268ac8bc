"""Findings about role classes against the interfaces declared on them: methods, parameters, defaults, generators.

Nothing is instantiated or called. A role whose class is not known (a factory function without a return annotation) is
not judged.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator

from omni_flow.control.findings import Finding
from omni_flow.control.signatures import Signature, role_class, signature_of
from omni_flow.control.spec import GraphSpec, InterfaceSpec


def check(spec: GraphSpec) -> Iterator[Finding]:
    """All findings of this module."""
    roles = {role.name: role for role in spec.roles}
    for interface in spec.interfaces:
        role = roles.get(interface.role)
        cls = role_class(role.factory) if role is not None else None
        if cls is None:
            continue
        signature = signature_of(cls, interface.method)
        if signature is None:
            yield _no_method(interface, cls)
            continue
        yield from _bindings(interface, signature)
        yield from _defaults(interface, signature)
        yield from _generator(interface, signature)
    for role in spec.roles:
        yield from _constructor(role.name, role_class(role.factory), dict(role.init), role.where)


def call_name(interface: InterfaceSpec) -> str:
    """How findings name the method: with its interface, where that has a name of its own."""
    own = interface.name.rpartition(".")[2]
    return f"{interface.name!r}" if own == interface.method else f"{interface.name!r} (method {interface.method!r})"


def _no_method(interface: InterfaceSpec, cls: type) -> Finding:
    known = [
        n for n, v in inspect.getmembers_static(cls) if not n.startswith("_") and callable(getattr(v, "__func__", v))
    ]
    near = difflib.get_close_matches(interface.method, known, n=1)
    mend = f"did you mean {near[0]!r}?" if near else f"its methods: {', '.join(map(repr, known)) or 'none'}"
    what = f"class {cls.__name__} of role {interface.role!r} has no method {interface.method!r}"
    return Finding("no-such-method", what, mend, interface.where)


def _bindings(interface: InterfaceSpec, signature: Signature) -> Iterator[Finding]:
    told: set[str] = set()
    for group in interface.groups:
        for slot in group:
            where = slot.where or interface.where
            known = signature.parameter(slot.param)
            if slot.param in told:
                continue
            told.add(slot.param)
            if slot.param == "ctx" and signature.takes_ctx:
                yield Finding(
                    "reserved-parameter",
                    f"{call_name(interface)} gets its context as 'ctx', but a slot binds {slot.field!r} to it",
                    "bind the field to another parameter: dict(other=field)",
                    where,
                )
            elif known is None and not signature.open:
                names = [p.name for p in signature.parameters]
                near = difflib.get_close_matches(slot.param, names, n=1)
                hint = f"dict({near[0]}=...)" if near else "dict(parameter=field)"
                yield Finding(
                    "unknown-parameter",
                    f"{call_name(interface)} has no parameter {slot.param!r}, to which {slot.field!r} is bound",
                    f"bind by name: {hint}; its parameters: {', '.join(map(repr, names)) or 'none'}",
                    where,
                )
            elif known is not None and not known.by_keyword:
                yield Finding(
                    "positional-parameter",
                    f"parameter {slot.param!r} of {call_name(interface)} is positional-only",
                    "move it behind the / of the signature: arguments are passed by name",
                    where,
                )


def _defaults(interface: InterfaceSpec, signature: Signature) -> Iterator[Finding]:
    bound = [{slot.param for slot in group} for group in interface.groups]
    may_miss = {slot.param: slot for group in interface.groups for slot in group if slot.optional}
    for parameter in signature.parameters:
        name = parameter.name
        if parameter.has_default:
            continue
        left_out = [index for index, group in enumerate(bound) if name not in group]
        if bound and len(left_out) == len(bound):
            yield Finding(
                "missing-parameter",
                f"parameter {name!r} of {call_name(interface)} has no default and no slot binds it",
                "bind a field to it, or give it a default",
                interface.where,
            )
        elif left_out:
            yield Finding(
                "missing-default",
                f"parameter {name!r} of {call_name(interface)} has no default, but group {left_out[0]} leaves it out",
                f"give it one: {name}=None",
                interface.where,
            )
        elif name in may_miss:
            yield Finding(
                "missing-default",
                f"parameter {name!r} of {call_name(interface)} has no default, but its slot {may_miss[name].field!r} "
                "is optional",
                f"give it one: {name}=None",
                may_miss[name].where or interface.where,
            )


def _generator(interface: InterfaceSpec, signature: Signature) -> Iterator[Finding]:
    streams = [repr(o.name) for o in interface.outputs if o.stream]
    if interface.batch is not None and (streams or signature.generator):
        yield Finding(
            "batch-generator",
            f"{call_name(interface)} is batched, but {'has the stream ' + streams[0] if streams else 'is a generator'}",
            "a batched method returns one list with a result per item; take batch= away, or the stream",
            interface.where,
        )
    elif streams and not signature.generator:
        yield Finding(
            "stream-without-generator",
            f"{call_name(interface)} has the stream {', '.join(streams)} but is not a generator",
            "yield the frames, or annotate an iterator as its return type; for a single value drop stream(...)",
            interface.where,
        )


def _constructor(role: str, cls: type | None, init: dict[str, object], where: str) -> Iterator[Finding]:
    if cls is None:
        return
    try:
        signature = inspect.signature(cls)
    except ValueError:
        return  # an extension type says nothing of its constructor
    try:
        signature.bind(**init)
    except TypeError as wrong:
        yield Finding(
            "bad-init",
            f"role {role!r}: {cls.__name__}({', '.join(f'{k}=...' for k in init)}): {wrong}",
            "make init= fit the constructor",
            where,
        )
