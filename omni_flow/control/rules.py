"""The lint rules about scopes, loops, joins and windows: graphs outside them are outside the confluence theorem.

Pure: `check(scopes, credit)` returns findings. Each rule is one small function; what a rule needs to be known and isn't
(an unknown field, say) is reported by inference, and the rule keeps quiet.
"""

from __future__ import annotations

from collections.abc import Iterator

from omni_flow.control.findings import Finding
from omni_flow.control.scopes import CLOSING, Scopes, levels_of, loop_source, reads, show_scope, slots_of
from omni_flow.control.spec import FieldRef, InterfaceSpec, Join, ParamRef, SlotSpec


def check(scopes: Scopes, credit: int) -> list[Finding]:
    """All findings of the rules of this module on an inferred graph."""
    found: list[Finding] = []
    for interface in scopes.spec.interfaces:
        found += _parameters(interface)
        found += _shadowed(scopes, interface)
        found += _windows(scopes, interface, credit)
        found += _ordered(scopes, interface)
        found += _counts(scopes, interface)
        found += _loop(scopes, interface)
    found += _feedback(scopes)
    found += _outputs(scopes)
    found += _uses(scopes)
    return found


def _parameters(interface: InterfaceSpec) -> Iterator[Finding]:
    for index, group in enumerate(interface.groups):
        seen: set[str] = set()
        for slot in group:
            if slot.param in seen:
                yield Finding(
                    "duplicate-parameter",
                    f"group {index} of {interface.name!r} binds parameter {slot.param!r} twice",
                    "bind each parameter once; dict(other=field) names another parameter",
                    slot.where or interface.where,
                )
            seen.add(slot.param)


def _key(slot: SlotSpec) -> tuple[object, ...]:
    return (slot.field, slot.join, slot.ordered, slot.levels, slot.over, slot.n, slot.size, slot.stride, slot.left)


def _shadowed(scopes: Scopes, interface: InterfaceSpec) -> Iterator[Finding]:
    """An earlier group that is a subset of a later one is never dead when the later one could run."""
    shapes = []
    for index, group in enumerate(interface.groups):
        back = any(scopes.is_back(s) for s in group)
        needed = {_key(s) for s in group if not s.optional}
        shapes.append((index, back, needed, {_key(s) for s in group}))
    for later, later_back, later_needed, later_all in shapes:
        for earlier, back, needed, everything in shapes[:later]:
            if back == later_back and everything and needed <= later_needed and everything <= later_all:
                yield Finding(
                    "shadowed-group",
                    f"group {later} of {interface.name!r} can never run: group {earlier} before it needs no more",
                    "declare the richer group first; groups are tried in declared order",
                    interface.where,
                )
                break


def _windows(scopes: Scopes, interface: InterfaceSpec, credit: int) -> Iterator[Finding]:
    windows = [s for s in slots_of(interface) if s.join is Join.WINDOW]
    if not windows:
        return
    where = windows[0].where or interface.where
    if len(windows) > 1:
        yield Finding(
            "two-windows",
            f"{interface.name!r} has {len(windows)} window slots",
            "cut each stream in an interface of its own",
            where,
        )
    elif len(interface.groups) > 1:
        yield Finding(
            "window-with-groups",
            f"{interface.name!r} has a window and {len(interface.groups)} groups",
            "an interface with a window has one group; put the alternatives into another interface",
            where,
        )
    if scopes.is_head(interface):
        yield Finding(
            "window-at-head",
            f"{interface.name!r} is the head of a loop and windows {windows[0].field!r}",
            "cut the stream in an interface before the loop",
            where,
        )
    for slot in windows:
        if slot.size < 1 or slot.stride < 1 or slot.left < 0:
            yield Finding(
                "window-shape",
                f"{interface.name!r}: window({slot.field}) has size {slot.size}, stride {slot.stride}, "
                f"left_context {slot.left}",
                "size and stride are at least 1, left_context at least 0",
                slot.where or interface.where,
            )
        if slot.policy is not None and slot.policy.max_frames + slot.left > credit:
            yield Finding(
                "window-exceeds-credit",
                f"{interface.name!r}: a window of {slot.field!r} may hold {slot.policy.max_frames + slot.left} frames, "
                f"but only {credit} numbers may be open",
                f"lower max_frames + left_context to {credit}, or raise the graph's credit",
                slot.where or interface.where,
            )


def _ordered(scopes: Scopes, interface: InterfaceSpec) -> Iterator[Finding]:
    for slot in slots_of(interface):
        if not slot.ordered:
            continue
        where = slot.where or interface.where
        if scopes.is_head(interface):
            yield Finding(
                "ordered-at-head",
                f"{interface.name!r} is the head of a loop and reads ordered({slot.field})",
                "order the stream in an interface before the loop; a loop's iterations are in order anyway",
                where,
            )
        elif scopes.slot_scope(interface, slot) == ():
            yield Finding(
                "ordered-outside-stream",
                f"{interface.name!r} reads ordered({slot.field}), but {slot.field!r} is not inside any stream",
                "read it plainly",
                where,
            )


def _counts(scopes: Scopes, interface: InterfaceSpec) -> Iterator[Finding]:
    for slot in slots_of(interface):
        yield from _count(scopes, interface, slot, interface.name, slot.where or interface.where)


def _count(scopes: Scopes, interface: InterfaceSpec | None, slot: SlotSpec, name: str, where: str) -> Iterator[Finding]:
    if slot.join is not Join.COUNT:
        return
    if isinstance(slot.n, ParamRef) and slot.n.name not in {p.name for p in scopes.spec.params}:
        yield Finding(
            "unknown-param",
            f"{name!r}: count({slot.field}, n) takes n from param {slot.n.name!r}, which is not declared",
            f"declare it: graph.param({slot.n.name!r}, int, default)",
            where,
        )
    if not isinstance(slot.n, FieldRef):
        return
    scope = scopes.slot_scope(interface, slot)
    if slot.n.name not in scopes.producer:
        yield Finding(
            "unknown-field",
            f"{name!r} takes the n of count({slot.field}, n) from {slot.n.name!r}, which nothing produces",
            "name a placeholder or an output of an interface",
            where,
        )
        return
    n_scope = scopes.fields.get(slot.n.name)
    if scope is not None and n_scope is not None and scope[: len(n_scope)] != n_scope:
        yield Finding(
            "n-not-visible",
            f"{name!r}: n of count({slot.field}, n) is {slot.n.name!r} in scope {show_scope(n_scope)}, which is not "
            f"visible in the slot's scope {show_scope(scope)}",
            "take n from a field of the slot's scope or an outer one",
            where,
        )


def _loop(scopes: Scopes, interface: InterfaceSpec) -> Iterator[Finding]:
    if not scopes.is_head(interface):
        return
    if interface.max_iters is None or interface.max_iters < 1:
        yield Finding(
            "head-without-max-iters",
            f"{interface.name!r} is the head of a loop without max_iters",
            "say max_iters=N (at least 1): it bounds the loop and its memory",
            interface.where,
        )
    for slot in slots_of(interface):
        if scopes.is_back(slot) and (slot.join is not Join.PLAIN or slot.ordered):
            yield Finding(
                "feedback-join",
                f"{interface.name!r} reads the feedback {slot.field!r} through a join",
                "a feedback slot reads the bound field's value of the iteration before; join inside the loop's body",
                slot.where or interface.where,
            )
    own = loop_source(interface.name)
    for slot in slots_of(interface):
        if scopes.is_back(slot):
            reader = _closes_own_loop(scopes, slot, own)
            if reader is not None:
                yield Finding(
                    "own-end",
                    f"feedback {slot.field!r} of {interface.name!r} depends on {reader!r}, which waits for the end of "
                    f"this very loop",
                    "feed back a field of the iteration; close the loop only outside it",
                    slot.where or interface.where,
                )
                return


def _closes_own_loop(scopes: Scopes, back: SlotSpec, own: str) -> str | None:
    """The name of an interface, on the way back from a feedback, that has a join closing the loop `own`."""
    start = scopes.target(back)
    around = scopes.interfaces.get(own.removesuffix("@loop"), ())
    pending = [start] if start is not None else []
    seen: set[str] = set()
    while pending:
        producer = scopes.producer.get(pending.pop())
        if producer is None or producer.name in seen:
            continue
        seen.add(producer.name)
        for slot in slots_of(producer):
            if own in origins(scopes, slot):
                return producer.name
            if scopes.is_back(slot) and loop_source(producer.name) in around:
                continue  # an earlier iteration of this loop or of one around it
            pending += reads(scopes, slot)
    return None


def origins(scopes: Scopes, slot: SlotSpec) -> set[str]:
    """The sources whose end a join needs: those it closes and, for a closed window, those that window was cut from."""
    closed = set(scopes.closed(slot)) if slot.join in CLOSING else set()
    pending = list(closed)
    while pending:
        name = pending.pop()
        if not name.endswith("@win"):
            continue
        for inner in slots_of(scopes.by_name[name.removesuffix("@win")]):
            if inner.join is Join.WINDOW:
                fresh = set(scopes.closed(inner)) - closed
                closed |= fresh
                pending += fresh
    return closed


def _feedback(scopes: Scopes) -> Iterator[Finding]:
    readers = {s.field: i for i in scopes.spec.interfaces for s in slots_of(i) if scopes.is_back(s)}
    for name, bound in scopes.spec.feedback.items():
        reader = readers.get(name)
        if bound is None:
            yield Finding(
                "unbound-feedback",
                f"feedback {name!r} is never bound",
                "call .bind(field) with the field whose value goes back",
                reader.where if reader else scopes.spec.where,
            )
            continue
        if bound not in scopes.producer:
            yield Finding(
                "unknown-field",
                f"feedback {name!r} is bound to {bound!r}, which nothing produces",
                "bind it to an output of an interface in the loop",
                reader.where if reader else scopes.spec.where,
            )
            continue
        for interface in scopes.spec.interfaces:
            if not any(s.field == name for s in slots_of(interface)):
                continue
            scope, expected = scopes.fields.get(bound), scopes.interfaces.get(interface.name)
            if scope is not None and expected is not None and scope != expected:
                yield Finding(
                    "feedback-scope",
                    f"feedback {name!r} of {interface.name!r} is bound to {bound!r} in scope {show_scope(scope)}, but "
                    f"the loop's iterations are {show_scope(expected)}",
                    "bind a field with one value in each iteration; close inner streams with last, collect or count",
                    interface.where,
                )


def _outputs(scopes: Scopes) -> Iterator[Finding]:
    for name, slot in scopes.spec.outputs.items():
        where = slot.where or scopes.spec.where
        if slot.field not in scopes.producer:
            yield Finding(
                "unknown-field",
                f"output {name!r} is {slot.field!r}, which nothing produces",
                "name a placeholder or an output of an interface",
                where,
            )
            continue
        if slot.join is Join.WINDOW:
            yield Finding(
                "output-window",
                f"output {name!r} is a window; only an interface cuts a stream",
                "give the field itself, or collect, count or last of it",
                where,
            )
            continue
        scope = scopes.fields.get(slot.field)
        if scope is not None and slot.join in CLOSING and not 0 < levels_of(slot, scope) <= len(scope):
            yield Finding(
                "join-outside-stream",
                f"output {name!r} reads {slot.join}({slot.field}) over {slot.over or slot.levels}, but its scope is "
                f"{show_scope(scope)}",
                "give the field itself, or close at most as many levels as the scope has",
                where,
            )
            continue
        yield from _count(scopes, None, slot, f"output {name}", where)


def _uses(scopes: Scopes) -> Iterator[Finding]:
    for use in scopes.spec.uses:
        for name in use.unbound:
            yield Finding(
                "use-unbound",
                f"use {use.name!r} of graph {use.graph!r} leaves its placeholder {name!r} unbound",
                f"add {name!r} to bind=",
                use.where,
            )
        for name in use.streamed:
            yield Finding(
                "use-streamed",
                f"use {use.name!r} of graph {use.graph!r} has the streamed placeholder {name!r}, which can't be bound",
                "inline a graph without streamed placeholders; stream into the outer graph and bind a field",
                use.where,
            )
