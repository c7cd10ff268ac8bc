"""Findings about names and values of declarations: identifiers, duplicates, unknown strategies, missing outputs."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from typing import Final

from omni_flow.control.findings import Finding
from omni_flow.control.spec import GraphSpec

BALANCES: Final = ("round_robin", "random", "least_loaded", "session", "cache_aware", "weighted")


def check(spec: GraphSpec) -> Iterator[Finding]:
    """All findings of this module."""
    yield from _identifiers(spec)
    yield from _duplicates(spec)
    yield from _roles(spec)
    if not spec.outputs and all(i.outputs for i in spec.interfaces):
        yield Finding(
            "no-outputs",
            f"graph {spec.name!r} has no output, so the client would receive nothing",
            "name what the client receives: graph.output(name=field)",
            spec.where,
        )


def _declared(spec: GraphSpec) -> Iterator[tuple[str, str, str]]:
    """(kind, name, where) of every name a user chose; of inlined parts only what `use` made of them."""
    for placeholder in spec.placeholders:
        yield "placeholder", placeholder.name, placeholder.where
    for param in spec.params:
        yield "param", param.name, param.where
    for role in spec.roles:
        yield "role", role.name, role.where
    for interface in spec.interfaces:
        yield "interface", interface.name, interface.where
    for name in spec.feedback:
        yield "feedback", name, spec.where


def _identifiers(spec: GraphSpec) -> Iterator[Finding]:
    names = list(_declared(spec))
    names += [("use", use.name, use.where) for use in spec.uses]
    names += [("output", name, slot.where) for name, slot in spec.outputs.items()]
    names += [(f"output of {i.name!r}", o.name, i.where) for i in spec.interfaces for o in i.outputs]
    for kind, name, where in names:
        own = name.rpartition("/")[2]  # what stands before it is the name of a use, judged by itself
        if not all(_is_name(part) for part in (own.split(".") if kind == "interface" else [own])):
            yield Finding(
                "invalid-name",
                f"{kind} {name!r} is not a name that role code can use",
                "take letters, digits and _, not beginning with a digit, and no keyword of Python",
                where,
            )


def _is_name(part: str) -> bool:
    return part.isidentifier() and part.isascii() and not keyword.iskeyword(part)


def _duplicates(spec: GraphSpec) -> Iterator[Finding]:
    seen: dict[tuple[str, str], str] = {}
    for kind, name, where in _declared(spec):
        # Placeholders and feedbacks are both read by their bare names.
        space = "field" if kind in ("placeholder", "feedback") else kind
        if (space, name) in seen:
            before = seen[space, name]
            other = f", first as a {before}" if before != kind else ""
            yield Finding(
                "duplicate-name",
                f"graph {spec.name!r}: {kind} {name!r} is declared twice{other}",
                "give each its own name"
                + ("; interface(..., name=) names an interface" if kind == "interface" else ""),
                where,
            )
        seen.setdefault((space, name), kind)


def _roles(spec: GraphSpec) -> Iterator[Finding]:
    for role in spec.roles:
        if role.balance not in BALANCES:
            yield Finding(
                "unknown-balance",
                f"role {role.name!r} asks for balance {role.balance!r}",
                f"take one of {', '.join(BALANCES)}",
                role.where,
            )
