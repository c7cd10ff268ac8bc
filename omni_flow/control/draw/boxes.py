"""What is drawn: boxes with ports for placeholders, interfaces and outputs, and the edges between the ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from omni_flow.control.signatures import role_class
from omni_flow.control.spec import FieldRef, GraphSpec, InterfaceSpec, Join, ParamRef, RoleSpec, SlotSpec


@dataclass(frozen=True, slots=True)
class Box:
    """One box. `ins` and `outs` are the names of its ports in order; `colour` is a number that equal roles share."""

    id: str
    kind: Literal["placeholder", "interface", "output"]
    title: str
    subtitle: str = ""
    note: str = ""
    ins: tuple[str, ...] = ()
    outs: tuple[str, ...] = ()
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """From an output port to an input port. `back`: the back edge of a loop."""

    source: str
    out: str
    target: str
    into: str
    label: str = ""
    stream: bool = False
    back: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """All boxes in declared order, and all edges."""

    name: str
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


def join_text(slot: SlotSpec) -> str:
    """The input policies of a slot in words; empty for a plain one."""
    text = {
        Join.PLAIN: "",
        Join.COLLECT: "collect",
        Join.LAST: "last",
        Join.COUNT: f"count {_count(slot)}",
        Join.WINDOW: _window(slot),
    }[slot.join]
    if slot.over is not None:
        text += f" over {slot.over.rpartition('.')[2]}"
    elif slot.levels > 1:
        text += f" over {slot.levels}"
    words = [text] if text else []
    if slot.ordered:
        words.insert(0, "ordered")
    if slot.optional:
        words.insert(0, "optional")
    return " ".join(words)


def picture(spec: GraphSpec) -> Picture:
    """What to draw of a graph."""
    roles = {role.name: role for role in spec.roles}
    colours = {role.name: index for index, role in enumerate(spec.roles)}
    boxes = [_placeholder(p.name, str(p.type or ""), p.stream, p.required) for p in spec.placeholders]
    boxes += [_interface(i, roles.get(i.role), colours.get(i.role, 0)) for i in spec.interfaces]
    boxes += [Box(f"out:{name}", "output", name, "output", ins=("",)) for name in spec.outputs]
    origin = {p.name: (f"in:{p.name}", "", p.stream) for p in spec.placeholders}
    origin |= {o.field: (i.name, _port(o.name, o.stream), o.stream) for i in spec.interfaces for o in i.outputs}
    edges: dict[tuple[str, str, str], Edge] = {}
    for interface in spec.interfaces:
        for index, group in enumerate(interface.groups):
            for slot in group:
                _add(
                    edges, spec, origin, slot, interface.name, slot.param, index if len(interface.groups) > 1 else None
                )
    for name, slot in spec.outputs.items():
        _add(edges, spec, origin, slot, f"out:{name}", "", None)
    return Picture(spec.name, tuple(boxes), tuple(edges.values()))


def _add(
    edges: dict[tuple[str, str, str], Edge],
    spec: GraphSpec,
    origin: dict[str, tuple[str, str, bool]],
    slot: SlotSpec,
    target: str,
    into: str,
    group: int | None,
) -> None:
    back = slot.field in spec.feedback
    field = spec.feedback.get(slot.field, slot.field)
    if field is None or field not in origin:
        return
    source, out, stream = origin[field]
    number = "" if group is None else f"{group + 1}"
    key = (field, target, into)
    known = edges.get(key)
    join = join_text(slot)
    if known is not None and number:
        # The same field in several groups: one edge, with the numbers of the groups.
        numbers, _, rest = known.label.partition(": ")
        label = f"{numbers},{number}" + (f": {rest}" if rest else "")
    elif number:
        label = f"{number}: {join}" if join else number
    else:
        label = join
    edges[key] = Edge(source, out, target, into, label, stream, back)


def _placeholder(name: str, type_: str, stream: bool, required: bool) -> Box:
    words = [type_] + (["stream"] if stream else []) + (["required"] if required else [])
    return Box(f"in:{name}", "placeholder", name, " ".join(w for w in words if w), outs=("",))


def _interface(interface: InterfaceSpec, role: RoleSpec | None, colour: int) -> Box:
    cls = None if role is None else role_class(role.factory)
    subtitle = [cls.__name__] if cls is not None else []
    if role is not None and role.replicas > 1:
        subtitle.append(f"{role.replicas} replicas")
    notes = []
    if interface.max_iters is not None:
        notes.append(f"at most {interface.max_iters} iterations")
    if interface.batch is not None:
        notes.append(f"batch {interface.batch.max}")
    if interface.retries:
        notes.append(f"retries {interface.retries}")
    if interface.race:
        notes.append("race")
    if interface.on_error == "absent":
        notes.append("absent on error")
    params = dict.fromkeys(slot.param for group in interface.groups for slot in group)
    return Box(
        interface.name,
        "interface",
        interface.name,
        ", ".join(subtitle),
        ", ".join(notes),
        tuple(params),
        tuple(_port(o.name, o.stream) for o in interface.outputs),
        colour,
    )


def _port(name: str, stream: bool) -> str:
    return f"{name}*" if stream else name


def _count(slot: SlotSpec) -> str:
    if isinstance(slot.n, ParamRef):
        return f"param {slot.n.name}"
    return slot.n.name if isinstance(slot.n, FieldRef) else str(slot.n)


def _window(slot: SlotSpec) -> str:
    if slot.policy is not None:
        return f"window {type(slot.policy).__name__}" + (f" left {slot.left}" if slot.left else "")
    stride = f" step {slot.stride}" if slot.stride != slot.size else ""
    return f"window {slot.size}{stride}" + (f" left {slot.left}" if slot.left else "")
