"""Random graphs: every construct of the control flow in every combination that lint allows.

`random_graph` draws a graph from a `random.Random`, interface by interface, keeping the scope of every field so that
slots fit. What it draws is legal as far as it can tell; the compiler's lint decides. `drawn_graphs` is the same as a
hypothesis strategy, which shrinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

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
)
from omni_flow.testing.standins import HashCut, value_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Scope = tuple[str, ...]
CLOSING = (Join.COLLECT, Join.COUNT, Join.LAST)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large and how odd the graphs are. Chances are per interface unless said otherwise."""

    interfaces: tuple[int, int] = (2, 8)
    depth: int = 3
    head: float = 0.2
    window: float = 0.15
    ordered: float = 0.15
    sink: float = 0.1
    race: float = 0.04
    on_error: float = 0.15
    second_group: float = 0.35
    stream: float = 0.5
    closing: float = 0.35
    optional: float = 0.3
    all_retries: float = 0.6
    shared_role: float = 0.25


DEFAULT_SHAPE = Shape()
SHAPES = (
    DEFAULT_SHAPE,
    Shape(window=0.35, ordered=0.4, stream=0.7, optional=0.15),
    Shape(interfaces=(2, 5), head=0.5, second_group=0.5, depth=4),
    Shape(interfaces=(4, 12), closing=0.2, shared_role=0.5, sink=0.05),
)
"""Shapes that go well together: the mixed one, windows and order, loops in loops, wide graphs of few roles."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A graph with the inputs of one request."""

    spec: GraphSpec
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]


def random_request(rng: Random, shape: Shape = DEFAULT_SHAPE) -> Drawn:
    """A random graph and random inputs for it."""
    spec = random_graph(rng, shape)
    return Drawn(spec, random_inputs(rng, spec), {"n": rng.choice([0, 1, 2, 3, "x"])} if rng.random() < 0.3 else {})


def random_graph(rng: Random, shape: Shape = DEFAULT_SHAPE) -> GraphSpec:
    """A random graph."""
    return _Drawing(rng, shape).graph()


def random_inputs(rng: Random, spec: GraphSpec) -> dict[str, Any]:
    """Random inputs: some are not sent, streamed ones have 0 to 5 elements."""
    inputs: dict[str, Any] = {}
    for placeholder in spec.placeholders:
        if rng.random() < 0.1 and not placeholder.required:
            inputs[placeholder.name] = None
        elif placeholder.stream:
            inputs[placeholder.name] = [value_of(rng, placeholder.type) for _ in range(rng.randint(0, 5))]
        else:
            inputs[placeholder.name] = value_of(rng, placeholder.type)
    return inputs


def drawn_graphs(shape: Shape = DEFAULT_SHAPE) -> SearchStrategy[Drawn]:
    """Random requests as a hypothesis strategy (needs the `dev` extra)."""
    from hypothesis import strategies as st

    return st.randoms(use_true_random=False).map(lambda rng: random_request(rng, shape))


class _Drawing:
    def __init__(self, rng: Random, shape: Shape) -> None:
        self.rng = rng
        self.shape = shape
        self.scopes: dict[str, Scope] = {}
        self.streamed: set[str] = set()
        self.interfaces: list[InterfaceSpec] = []
        self.feedback: dict[str, str] = {}
        self.loops: dict[str, Scope] = {}

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def graph(self) -> GraphSpec:
        placeholders = []
        for index in range(self.rng.randint(1, 3)):
            stream = self.chance(0.3)
            placeholders.append(PlaceholderSpec(f"p{index}", stream=stream))
            self.scopes[f"p{index}"] = (f"p{index}",) if stream else ()
        for index in range(self.rng.randint(*self.shape.interfaces)):
            self.add_interface(f"I{index}" if not self.chance(0.15) else f"u{index % 2}/I{index}")
        self.rebind()
        self.interfaces = self.with_roles()
        roles = dict.fromkeys(interface.role for interface in self.interfaces)
        return GraphSpec(
            name="random",
            placeholders=tuple(placeholders),
            params=(ParamSpec("n", self.rng.choice([1, 2, 3])),),
            roles=tuple(RoleSpec(role, replicas=self.rng.randint(1, 3)) for role in roles),
            interfaces=tuple(self.interfaces),
            feedback=dict(self.feedback),
            outputs=self.outputs(),
        )

    # Slots

    def slot(self, name: str, field: str, join: Join, levels: int = 1) -> SlotSpec:
        """A slot of interface `name` that reads `field`, its details drawn."""
        scope = self.scopes[field]
        optional = self.chance(self.shape.optional)
        param = f"{field}_{join.value}{levels}".replace(".", "_").replace("/", "_")
        slot = SlotSpec(field, param, optional, join, levels=levels)
        if join in CLOSING and self.chance(0.2):
            slot = replace(slot, over=scope[len(scope) - levels])
        if join is Join.COUNT:
            return replace(slot, n=self.count(scope[: len(scope) - levels]))
        if join is Join.WINDOW:
            size = self.rng.randint(1, 4)
            left = self.rng.choice([0, 0, 1, 2])
            if self.chance(0.25):
                return replace(slot, size=size, stride=size, left=left, policy=HashCut(size, self.rng.randint(1, 3)))
            return replace(slot, size=size, stride=self.rng.randint(1, size), left=left)
        return slot

    def count(self, scope: Scope) -> Count:
        kind = self.rng.random()
        if kind < 0.5:
            return self.rng.randint(1, 4)
        if kind < 0.65:
            return ParamRef("n")
        visible = [field for field, at in self.scopes.items() if at == scope[: len(at)]]
        if kind < 0.9 and visible:
            return FieldRef(self.rng.choice(visible))
        return "all"

    def any_slot(self, name: str, within: Scope | None, exact: bool = False) -> SlotSpec | None:
        """A random slot, its scope a prefix of `within` (or exactly that); None where none was found."""
        fields = list(self.scopes)
        for _ in range(12):
            field = self.rng.choice(fields if self.chance(0.5) else fields[-4:])
            scope = self.scopes[field]
            join, levels = Join.PLAIN, 1
            if scope and self.chance(self.shape.closing):
                join = self.rng.choice(CLOSING)
                levels = self.rng.randint(1, len(scope))
            at = scope if join is Join.PLAIN else scope[: len(scope) - levels]
            if within is None or at == within or (not exact and at == within[: len(at)]):
                return self.slot(name, field, join, levels)
        return None

    def slot_scope(self, slot: SlotSpec) -> Scope:
        scope = self.scopes[slot.field]
        return scope if slot.join is Join.PLAIN else scope[: len(scope) - slot.levels]

    def group(self, name: str, first: SlotSpec, scope: Scope) -> tuple[SlotSpec, ...]:
        """A group around its slot of full scope."""
        slots = {first.param: first}
        for _ in range(self.rng.choice([0, 0, 1, 1, 2])):
            slot = self.any_slot(name, scope)
            if slot is not None:
                slots.setdefault(slot.param, slot)
        group = list(slots.values())
        self.rng.shuffle(group)
        return tuple(group)

    # Interfaces

    def add_interface(self, name: str) -> None:
        streams = [field for field, scope in self.scopes.items() if scope]
        groups: list[tuple[SlotSpec, ...]]
        head = False
        if streams and self.chance(self.shape.window):
            field = self.rng.choice(streams)
            scope = (*self.scopes[field][:-1], f"{name}@win")
            first = self.slot(name, field, Join.WINDOW)
            if self.chance(self.shape.ordered):
                first = replace(first, ordered=True)
            groups = [self.group(name, first, scope)]
        else:
            found = self.any_slot(name, None)
            assert found is not None, "any scope is allowed"
            first, scope = found, self.slot_scope(found)
            head = self.chance(self.shape.head) and len(scope) < self.shape.depth
            if scope and first.join is Join.PLAIN and not head and self.chance(self.shape.ordered):
                first = replace(first, ordered=True)
            groups = [self.group(name, first, scope)]
            while len(groups) < 3 and self.chance(self.shape.second_group):
                another = self.any_slot(name, scope, exact=True)
                if another is not None:
                    self.add_group(groups, self.group(name, another, scope))
        race = len(groups) > 1 and self.chance(self.shape.race) and not head
        outputs = self.draw_outputs(name, len(scope) + head)
        max_iters = None
        if head:
            max_iters = self.rng.randint(1, 4)
            single = OutputSpec(f"{name}.x", f"{name}.x")
            outputs.append(single)
            groups += self.feedback_groups(name, scope)
            scope = (*scope, f"{name}@loop")
            self.loops[name] = scope
        self.interfaces.append(
            InterfaceSpec(
                name,
                name,
                "run",
                tuple(groups),
                tuple(outputs),
                race=race,
                max_iters=max_iters,
                on_error="absent" if self.chance(self.shape.on_error) else "fail",
            )
        )
        for output in outputs:
            self.scopes[output.field] = (*scope, output.field) if output.stream else scope
            if output.stream:
                self.streamed.add(output.field)

    def add_group(self, groups: list[tuple[SlotSpec, ...]], group: tuple[SlotSpec, ...]) -> None:
        """Append a group unless an earlier one shadows it."""
        if not any(_shadows(earlier, group) for earlier in groups):
            groups.append(group)

    def feedback_groups(self, name: str, scope: Scope) -> list[tuple[SlotSpec, ...]]:
        backs = [f"{name}.fb"] + ([f"{name}.gb"] if self.chance(0.3) else [])
        for back in backs:
            self.feedback[back] = f"{name}.x"
        slots = [
            SlotSpec(back, f"back{index}", optional=index > 0 or self.chance(0.15)) for index, back in enumerate(backs)
        ]
        groups: list[tuple[SlotSpec, ...]] = []
        if len(slots) > 1 and self.chance(0.3):
            slots[1] = replace(slots[1], optional=False)
            self.add_group(groups, (slots[0], *self.broadcasts(name, scope)))
            self.add_group(groups, (slots[1], *self.broadcasts(name, scope)))
            if len(groups) < 2:
                del self.feedback[backs[1]]
            return groups
        return [(*slots, *self.broadcasts(name, scope))]

    def broadcasts(self, name: str, scope: Scope) -> list[SlotSpec]:
        slot = self.any_slot(name, scope) if self.chance(0.4) else None
        return [] if slot is None else [slot]

    def draw_outputs(self, name: str, depth: int) -> list[OutputSpec]:
        if self.chance(self.shape.sink):
            return []
        outputs = []
        for index in range(self.rng.choice([1, 1, 2, 2, 3])):
            stream = depth < self.shape.depth and self.chance(self.shape.stream / (1 + depth / 2))
            output = f"{name}.{'s' if stream else 'v'}{index}"
            outputs.append(OutputSpec(output, output, stream))
        return outputs

    # The whole

    def rebind(self) -> None:
        """Bind some back edges to fields further down the loop's body, where that closes no loop by its own end."""
        for back in list(self.feedback):
            head = back.rpartition(".")[0]
            scope = self.loops[head]
            body = [f for f, at in self.scopes.items() if at == scope and f not in self.streamed]
            own = self.feedback[back]
            self.feedback[back] = self.rng.choice(body)
            if any(self.closes_itself(name) for name in self.loops):
                self.feedback[back] = own

    def closes_itself(self, head: str) -> bool:
        """Whether a back edge of this head depends on a join, a window or a count that needs the end of its loop."""
        producers = {output.field: i for i in self.interfaces for output in i.outputs}
        loop = f"{head}@loop"
        interface = next(i for i in self.interfaces if i.name == head)
        todo = [self.feedback[s.field] for group in interface.groups for s in group if s.field in self.feedback]
        seen: set[str] = set()
        while todo:
            field = todo.pop()
            producer = producers.get(field)
            if field in seen or producer is None:
                continue
            seen.add(field)
            for slot in (slot for group in producer.groups for slot in group):
                read = self.feedback.get(slot.field, slot.field)
                if read != slot.field and f"{producer.name}@loop" in self.loops[head]:
                    continue  # an earlier iteration of this loop or of one around it
                if slot.join is Join.WINDOW and self.scopes[read][-1] == loop:
                    return True
                if slot.join in CLOSING and loop in self.scopes[read][len(self.scopes[read]) - slot.levels :]:
                    return True
                todo.append(read)
                if isinstance(slot.n, FieldRef):
                    todo.append(slot.n.name)
        return False

    def with_roles(self) -> list[InterfaceSpec]:
        retries = self.rng.randint(1, 3) if self.chance(self.shape.all_retries) else 0
        found: list[InterfaceSpec] = []
        for index, interface in enumerate(self.interfaces):
            role = f"r{index}"
            if found and self.chance(self.shape.shared_role):
                role = self.rng.choice(found).role
            tries = retries or self.rng.choice([0, 0, 1])
            found.append(replace(interface, role=role, method=interface.name.rpartition("/")[2], retries=tries))
        return found

    def outputs(self) -> dict[str, SlotSpec]:
        read = {slot.field for i in self.interfaces for group in i.groups for slot in group}
        outputs: dict[str, SlotSpec] = {}
        fields = [field for i in self.interfaces for field in (output.field for output in i.outputs)]
        for field in fields:
            if not self.chance(0.3 if field in read else 0.85):
                continue
            scope = self.scopes[field]
            slot = SlotSpec(field, field)
            if scope and self.chance(0.35):
                slot = replace(slot, join=self.rng.choice(CLOSING), levels=self.rng.randint(1, len(scope)))
                if slot.join is Join.COUNT:
                    slot = replace(slot, n=self.count(scope[: len(scope) - slot.levels]))
            outputs[f"o_{field}"] = slot
        if not outputs and fields:
            outputs[f"o_{fields[-1]}"] = SlotSpec(fields[-1], fields[-1])
        return outputs


def _shadows(earlier: Sequence[SlotSpec], later: Sequence[SlotSpec]) -> bool:
    """Whether the earlier group is ready whenever the later one is: required ⊆ required and all ⊆ all."""

    def what(slots: Sequence[SlotSpec]) -> set[object]:
        return {replace(slot, param="", optional=False, ordered=False) for slot in slots}

    required = what([slot for slot in earlier if not slot.optional])
    return required <= what([slot for slot in later if not slot.optional]) and what(earlier) <= what(later)
