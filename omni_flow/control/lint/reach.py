"""Findings about what can ever happen: groups that can never be ready, interfaces that can never run.

The least fixed point of "can have a value": placeholders can; an output can if its interface can run; an interface can
run if one of its groups can be ready. A group can be ready if each slot that is not optional can have a value, and at
least one slot can (a group whose slots are all absent is dead).
"""

from __future__ import annotations

from collections.abc import Iterator

from omni_flow.control.findings import Finding
from omni_flow.control.spec import FieldRef, GraphSpec, Join, SlotSpec


def check(spec: GraphSpec) -> Iterator[Finding]:
    """`unreachable-interface` and `group-never-ready`, only where every field that is read exists."""
    produced = {p.name for p in spec.placeholders} | {o.field for i in spec.interfaces for o in i.outputs}
    live, running = _live(spec)
    for interface in spec.interfaces:
        if any(_target(spec, s) not in produced for group in interface.groups for s in group):
            continue  # the unknown field is the finding; what follows from it would only hide it
        if interface.name not in running:
            if interface.groups:
                why = "; ".join(_why(spec, index, group, live) for index, group in enumerate(interface.groups))
            else:
                why = "it has no groups"
            yield Finding(
                "unreachable-interface",
                f"{interface.name!r} can never run: {why}",
                "feed it, directly or through others, from a placeholder",
                interface.where,
            )
            continue
        for index, group in enumerate(interface.groups):
            if group and not _ready(spec, group, live):
                yield Finding(
                    "group-never-ready",
                    f"{interface.name!r} can never run on {_why(spec, index, group, live)}",
                    "remove the group, or feed what it waits for from a placeholder",
                    interface.where,
                )


def _live(spec: GraphSpec) -> tuple[set[str], set[str]]:
    """The fields that can have a value, and the interfaces that can run."""
    live = {p.name for p in spec.placeholders}
    running: set[str] = set()
    grown = True
    while grown:
        grown = False
        for interface in spec.interfaces:
            if interface.name not in running and any(_ready(spec, group, live) for group in interface.groups):
                running.add(interface.name)
                live |= {o.field for o in interface.outputs}
                grown = True
    return live, running


def _target(spec: GraphSpec, slot: SlotSpec) -> str | None:
    return spec.feedback.get(slot.field, slot.field)


def _can(spec: GraphSpec, slot: SlotSpec, live: set[str]) -> bool:
    if slot.join is Join.COUNT and isinstance(slot.n, FieldRef) and slot.n.name not in live:
        return False
    return _target(spec, slot) in live


def _ready(spec: GraphSpec, group: tuple[SlotSpec, ...], live: set[str]) -> bool:
    can = [_can(spec, slot, live) for slot in group]
    return any(can) and all(ok or slot.optional for ok, slot in zip(can, group, strict=True))


def _why(spec: GraphSpec, index: int, group: tuple[SlotSpec, ...], live: set[str]) -> str:
    missing = [repr(s.field) for s in group if not _can(spec, s, live)]
    return f"group {index}, which waits for {' and '.join(missing)}" if missing else f"group {index}, which is empty"
