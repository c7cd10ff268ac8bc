"""Notes: what works, but that its author may want to know. Never an error."""

from __future__ import annotations

from collections.abc import Iterator

from omni_flow.control.findings import Finding
from omni_flow.control.plan import GATEWAY, CreditReader, Plan
from omni_flow.control.spec import FieldRef, GraphSpec, Join


def check(spec: GraphSpec) -> Iterator[Finding]:
    """Notes that need no plan: fields and placeholders nobody reads, roles without an interface, timing."""
    read = _read(spec)
    for placeholder in spec.placeholders:
        if placeholder.name not in read:
            what = f"nobody reads placeholder {placeholder.name!r}"
            yield Finding("unread-field", what, "bind it to a slot, or remove it", placeholder.where, "note")
    for interface in spec.interfaces:
        for output in interface.outputs:
            if output.field not in read:
                what = f"nobody reads {output.field!r}"
                mend = "bind it to a slot or to graph.output, or remove it from outputs"
                yield Finding("unread-field", what, mend, interface.where, "note")
        if interface.race:
            what = f"{interface.name!r} is a race: its result may depend on timing"
            yield Finding(
                "race", what, "drop race=True if the declared order of groups will do", interface.where, "note"
            )
        for slot in (s for group in interface.groups for s in group):
            if slot.policy is not None and getattr(slot.policy, "timed", False):
                what = f"{interface.name!r} cuts {slot.field!r} by time: its result may depend on timing"
                mend = "use a policy that looks at frames only"
                yield Finding("race", what, mend, slot.where or interface.where, "note")
    used = {interface.role for interface in spec.interfaces}
    for role in spec.roles:
        if role.name not in used:
            what = f"role {role.name!r} has no interface, so it would never be called"
            yield Finding("unused-role", what, "declare role.interface(...), or remove it", role.where, "note")


def check_plan(plan: Plan) -> Iterator[Finding]:
    """Notes about credit: readers that are not waited for, and replayable interfaces that keep a whole stream."""
    by_name = {interface.name: interface.spec for interface in plan.interfaces}
    for source in plan.sources:
        for reader in source.spooled:
            if reader.interface == source.creator != GATEWAY:
                continue  # an interface always runs ahead of its own windows: that says nothing
            name = _reader(plan, reader)
            place = by_name[name].where if name in by_name else plan.spec.where
            what = f"{name!r} can only go on when {source.name!r} goes on, so it may hold that whole stream"
            mend = "nothing is wrong; to bound its memory, let it not wait for a summary of the stream"
            yield Finding("spooled-reader", what, mend, place, "note")
        creator = None if source.creator == GATEWAY else plan.interfaces[source.creator]
        if creator is None or source.kind != "stream":
            continue
        for interface in plan.interfaces:
            if interface.spec.retries and source.id in interface.scope:
                what = (
                    f"{interface.name!r} is replayable, so the senders of {source.name!r} keep the whole stream "
                    "until the request ends"
                )
                yield Finding(
                    "retries-keep-stream", what, "drop retries= if memory matters", interface.spec.where, "note"
                )


def _reader(plan: Plan, reader: CreditReader) -> str:
    if reader.interface != GATEWAY:
        return plan.interfaces[reader.interface].name
    return f"output {plan.outputs[reader.output].name}"


def _read(spec: GraphSpec) -> set[str]:
    slots = [s for i in spec.interfaces for group in i.groups for s in group] + list(spec.outputs.values())
    read = {s.field for s in slots}
    read |= {s.n.name for s in slots if s.join is Join.COUNT and isinstance(s.n, FieldRef)}
    # A back edge is read where its feedback is; bindings count even if it is not, for that is a finding of its own.
    read |= {bound for bound in spec.feedback.values() if bound is not None}
    return read | {bound for use in spec.uses for bound in use.bind.values()}
