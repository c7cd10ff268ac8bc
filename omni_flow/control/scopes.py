"""Scope inference: which sources number the activations of each interface and the facts of each field.

Pure. Works on names; `compile.py` turns the result into indices. Collects findings instead of raising, so that one run
shows everything that is wrong; where a scope can't be known the interface is left out and its readers are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from omni_flow.control.findings import Finding
from omni_flow.control.spec import FieldRef, GraphSpec, InterfaceSpec, Join, OutputSpec, SlotSpec

Names = tuple[str, ...]
CLOSING = (Join.COLLECT, Join.COUNT, Join.LAST)


def loop_source(interface: str) -> str:
    """Name of the loop whose head is `interface`."""
    return f"{interface}@loop"


def window_source(interface: str) -> str:
    """Name of the window source of `interface`."""
    return f"{interface}@win"


@dataclass(slots=True)
class Scopes:
    """What inference found. `producer` maps a field to its interface (None: a placeholder)."""

    spec: GraphSpec
    fields: dict[str, Names] = field(default_factory=dict)
    interfaces: dict[str, Names] = field(default_factory=dict)
    producer: dict[str, InterfaceSpec | None] = field(default_factory=dict)
    output_of: dict[str, OutputSpec] = field(default_factory=dict)
    by_name: dict[str, InterfaceSpec] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def target(self, slot: SlotSpec) -> str | None:
        """The field a slot reads: through a back edge, the bound one."""
        return self.spec.feedback.get(slot.field, slot.field)

    def is_back(self, slot: SlotSpec) -> bool:
        return slot.field in self.spec.feedback

    def is_head(self, interface: InterfaceSpec) -> bool:
        return any(self.is_back(s) for g in interface.groups for s in g)

    def is_stream(self, name: str) -> bool:
        """Whether a field is itself a source of numbers (a stream output or a streamed placeholder)."""
        output = self.output_of.get(name)
        if output is not None:
            return output.stream
        return any(p.name == name and p.stream for p in self.spec.placeholders)

    def slot_scope(self, interface: InterfaceSpec | None, slot: SlotSpec) -> Names | None:
        """The slot's scope, or None when it can't be known (a finding says why elsewhere)."""
        target = self.target(slot)
        scope = self.fields.get(target) if target is not None else None
        if scope is None:
            return None
        if slot.join in CLOSING:
            levels = levels_of(slot, scope)
            return scope[: len(scope) - levels] if 0 < levels <= len(scope) else None
        if slot.join is Join.WINDOW:
            return (*scope[:-1], window_source(interface.name)) if scope and interface is not None else None
        return scope

    def closed(self, slot: SlotSpec) -> Names:
        """The sources that a closing join or a window takes off the field's scope."""
        scope = self.fields.get(self.target(slot) or "", ())
        if slot.join in CLOSING:
            return scope[len(scope) - levels_of(slot, scope) :]
        return scope[-1:] if slot.join is Join.WINDOW else ()


def levels_of(slot: SlotSpec, scope: Names) -> int:
    """How many sources a closing join takes off `scope`; 0 if `over` names none of them."""
    if slot.over is None:
        return slot.levels
    for k, source in enumerate(scope):
        if source == slot.over or source.endswith(f".{slot.over}"):
            return len(scope) - k
    return 0


def slots_of(interface: InterfaceSpec) -> Iterator[SlotSpec]:
    """Every slot of every group, in declared order."""
    for group in interface.groups:
        yield from group


def reads(scopes: Scopes, slot: SlotSpec) -> Iterator[str]:
    """The fields a slot depends on: its own, and that of a count's n."""
    target = scopes.target(slot)
    if target is not None:
        yield target
    if slot.join is Join.COUNT and isinstance(slot.n, FieldRef):
        yield slot.n.name


def infer(spec: GraphSpec) -> Scopes:
    """Infer all scopes of `spec`. Findings of scopes and shapes are in the result; nothing is raised."""
    found = Scopes(spec)
    _declare(found)
    _sort(found)
    for name in found.order:
        _infer_interface(found, found.by_name[name])
    return found


def _declare(found: Scopes) -> None:
    for placeholder in found.spec.placeholders:
        found.producer[placeholder.name] = None
        found.fields[placeholder.name] = (placeholder.name,) if placeholder.stream else ()
    for interface in found.spec.interfaces:
        found.by_name[interface.name] = interface
        for output in interface.outputs:
            if output.field in found.producer:
                found.findings.append(
                    Finding(
                        "two-producers",
                        f"field {output.field!r} is produced by {interface.name!r} and by "
                        f"{_producer_name(found, output.field)}",
                        "give one of the two outputs another name",
                        interface.where,
                    )
                )
                continue
            found.producer[output.field] = interface
            found.output_of[output.field] = output


def _producer_name(found: Scopes, name: str) -> str:
    producer = found.producer[name]
    return "a placeholder" if producer is None else repr(producer.name)


def _sort(found: Scopes) -> None:
    """Topological order of the interfaces over all edges but feedback; a cycle is a finding."""
    state: dict[str, int] = {}
    trail: list[str] = []
    reported: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        state[name] = 1
        trail.append(name)
        interface = found.by_name[name]
        for slot in slots_of(interface):
            needed = [slot.field] if not found.is_back(slot) else []
            if slot.join is Join.COUNT and isinstance(slot.n, FieldRef):
                needed.append(slot.n.name)
            for field_name in needed:
                producer = found.producer.get(field_name)
                if producer is None:
                    continue
                if state.get(producer.name) == 1:
                    cycle = trail[trail.index(producer.name) :]
                    if frozenset(cycle) not in reported:
                        reported.add(frozenset(cycle))
                        found.findings.append(
                            Finding(
                                "cycle",
                                f"{' -> '.join([*cycle, producer.name])} is a cycle without a feedback",
                                "declare one of these edges as graph.feedback(name) and bind it",
                                interface.where,
                            )
                        )
                elif producer.name not in state:
                    visit(producer.name)
        trail.pop()
        state[name] = 2
        found.order.append(name)

    for interface in found.spec.interfaces:
        if interface.name not in state:
            visit(interface.name)


def _infer_interface(found: Scopes, interface: InterfaceSpec) -> None:
    head = found.is_head(interface)
    group_scopes: list[tuple[int, Names]] = []
    complete = True
    for index, group in enumerate(interface.groups):
        if not group:
            found.findings.append(
                Finding(
                    "empty-group",
                    f"group {index} of {interface.name!r} has no slot",
                    "remove the group or list what it needs",
                    interface.where,
                )
            )
            complete = False
            continue
        back = any(found.is_back(s) for s in group)
        scope = _group_scope(found, interface, index, group)
        if scope is None:
            if not (back and all(found.is_back(s) for s in group)):
                complete = False
        elif not back or any(not found.is_back(s) for s in group):
            group_scopes.append((index, scope))
    entries = [(i, s) for i, s in group_scopes if not any(found.is_back(x) for x in interface.groups[i])]
    if head and not entries and complete:
        found.findings.append(
            Finding(
                "head-without-entry",
                f"{interface.name!r} reads a feedback in each of its groups, so its loop can never begin",
                "add a group without the feedback: it is what iteration 0 runs on",
                interface.where,
            )
        )
    if not entries or not complete:
        return
    scope = entries[0][1]
    for index, other in entries[1:]:
        if other != scope:
            found.findings.append(
                Finding(
                    "group-scopes",
                    f"groups {entries[0][0]} and {index} of {interface.name!r} have different scopes: "
                    f"{show_scope(scope)} and {show_scope(other)}",
                    "close the longer one with collect, count, last or window, or use two interfaces",
                    interface.where,
                )
            )
            return
    for index, other in group_scopes:
        if head and (index, other) not in entries and other != scope[: len(other)]:
            found.findings.append(
                Finding(
                    "group-scopes",
                    f"group {index} of the loop head {interface.name!r} reads scope {show_scope(other)}, which is not "
                    f"visible where the loop is entered, at {show_scope(scope)}",
                    "let the other slots of a feedback group be fields that the loop is entered with",
                    interface.where,
                )
            )
            return
    if head:
        scope = (*scope, loop_source(interface.name))
    found.interfaces[interface.name] = scope
    for output in interface.outputs:
        if found.producer.get(output.field) is interface:
            found.fields[output.field] = (*scope, output.field) if output.stream else scope


def _group_scope(found: Scopes, interface: InterfaceSpec, index: int, group: tuple[SlotSpec, ...]) -> Names | None:
    """The longest slot scope of a group; feedback slots are left out, they have the head's own scope."""
    longest: Names | None = None
    owner = ""
    known = True
    for slot in group:
        if found.is_back(slot):
            continue
        scope = found.slot_scope(interface, slot)
        if scope is None:
            known = False
            _explain_unknown(found, interface, slot)
            continue
        if longest is None:
            longest, owner = scope, slot.field
            continue
        shared = min(len(scope), len(longest))
        if scope[:shared] != longest[:shared]:
            found.findings.append(
                Finding(
                    "incomparable-scopes",
                    f"group {index} of {interface.name!r} reads {owner!r} in scope {show_scope(longest)} and "
                    f"{slot.field!r} in scope {show_scope(scope)}: neither is a prefix of the other, so their numbers "
                    "don't belong together",
                    f"close one of them: collect({slot.field}), count({slot.field}, n), last({slot.field}) "
                    f"or window({slot.field}, ...)",
                    slot.where or interface.where,
                )
            )
            return None
        if len(scope) > len(longest):
            longest, owner = scope, slot.field
    return longest if known else None


def _explain_unknown(found: Scopes, interface: InterfaceSpec, slot: SlotSpec) -> None:
    """Why a slot's scope is unknown, when this slot itself is to blame."""
    where = slot.where or interface.where
    target = found.target(slot)
    if target is None or target not in found.producer:
        found.findings.append(
            Finding(
                "unknown-field",
                f"{interface.name!r} reads {slot.field!r}, which nothing produces",
                "name a placeholder or an output of an interface",
                where,
            )
        )
        return
    scope = found.fields.get(target)
    if scope is None:
        return
    if slot.join is Join.WINDOW:
        what = f"{interface.name!r} windows {slot.field!r}, which is not inside any stream or loop"
        found.findings.append(Finding("window-outside-stream", what, "read it plainly, without window", where))
    elif slot.join in CLOSING:
        found.findings.append(
            Finding(
                "join-outside-stream",
                f"{interface.name!r} reads {slot.join}({slot.field}) over {slot.over or slot.levels}, but its scope is "
                f"{show_scope(scope)}",
                "read it plainly, or close at most as many levels as the scope has",
                where,
            )
        )


def show_scope(scope: Names) -> str:
    """A scope as findings print it."""
    return "(" + ", ".join(scope) + ")"
