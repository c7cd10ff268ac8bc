"""The DSL in which a user declares a graph: `Graph` collects, `Graph.compile()` returns an immutable `CompiledGraph`.

Declarations are only recorded here. `lowering.py` makes the neutral `GraphSpec` of them, `lint` and the compiler read
that. A call with an argument of the wrong kind raises `DeclarationError` at once; all else is a finding of `lint`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from omni_flow.control.compile import DEFAULT_CREDIT
from omni_flow.control.compiled import CompiledGraph, compile_graph, examine
from omni_flow.control.declare import DeclarationError, need_bool, need_int, need_str, where
from omni_flow.control.findings import Finding
from omni_flow.control.lowering import lower
from omni_flow.control.signatures import typed_outputs
from omni_flow.control.slots import Feedback, Field, Input, Param, Slot, StreamOutput, as_slot, need_type
from omni_flow.control.spec import (
    BatchSpec,
    GraphSpec,
    InterfaceSpec,
    Join,
    OutputSpec,
    ParamSpec,
    PlaceholderSpec,
    RoleSpec,
)
from omni_flow.control.strategies import Balance
from omni_flow.control.types import Type

Group = Sequence[Input | Mapping[str, Input]]
Output = str | StreamOutput | Mapping[str, object]


class UnknownName(AttributeError):
    """An output that an interface or a used graph does not have."""

    def __init__(self, owner: str, name: str, known: Sequence[str]) -> None:
        self.owner, self.name, self.known = owner, name, tuple(known)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(map(repr, known)) or 'none'}"
        super().__init__(f"{owner} has no output {name!r}{hint}")


class Interface:
    """One entry point of a role in a graph. Its outputs are its attributes: `llm.token` or `llm["token"]`."""

    __slots__ = ("_fields", "_groups", "_id", "_role", "_spec")

    def __init__(self, role: Role, spec: InterfaceSpec, groups: tuple[tuple[tuple[str, Slot], ...], ...]) -> None:
        self._id = spec.name
        self._role = role
        self._spec = spec
        self._groups = groups
        self._fields = {o.name: Field(role._graph, o.field, o.name, o.type, o.stream) for o in spec.outputs}

    def __getitem__(self, name: str) -> Field:
        found = self._fields.get(name)
        if found is None:
            raise UnknownName(self._id, name, list(self._fields))
        return found

    def __getattr__(self, name: str) -> Field:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __dir__(self) -> list[str]:
        return list(self._fields)

    def __repr__(self) -> str:
        return f"<interface {self._id}: {', '.join(self._fields)}>"


class Role:
    """A computing unit of a graph, deployed as replicas. Made by `Graph.role`."""

    __slots__ = ("_graph", "_spec")

    def __init__(self, graph: Graph, spec: RoleSpec) -> None:
        self._graph = graph
        self._spec = spec

    def interface(
        self,
        method: str,
        inputs: Sequence[Group],
        outputs: Sequence[Output] = (),
        *,
        name: str | None = None,
        race: bool = False,
        max_iters: int | None = None,
        retries: int = 0,
        on_error: Literal["fail", "absent"] = "fail",
        batch: BatchSpec | None = None,
    ) -> Interface:
        """Declare one entry point.

        `inputs` are OR groups in declared order, each a list of AND slots: a field binds to the parameter of its own
        name, a dict binds by parameter name. `outputs` are names, `stream(name)`, or dicts of name to type. `race`: the
        first complete group wins instead of the first declared that is not dead. `max_iters` bounds a loop whose head
        this is. `retries=n` declares the method replayable. `on_error="absent"`: what an exception leaves
        open is absent, not failed.
        """
        place = where()
        if on_error not in ("fail", "absent"):
            raise DeclarationError("on_error", '"fail" or "absent"', on_error)
        if batch is not None:
            if not isinstance(batch, BatchSpec):
                raise DeclarationError("batch", "a Batch(max=, wait_ms=)", batch)
            need_int("batch.max", batch.max, 1)
            if isinstance(batch.wait_ms, bool) or not isinstance(batch.wait_ms, (int, float)) or batch.wait_ms < 0:
                raise DeclarationError("batch.wait_ms", "milliseconds, 0 or more", batch.wait_ms)
        own = need_str("name", method if name is None else name)
        full = f"{self._spec.name}.{own}"
        groups = _groups(inputs, place)
        spec = InterfaceSpec(
            name=full,
            role=self._spec.name,
            method=need_str("method", method),
            groups=(),
            outputs=typed_outputs(self._spec.factory, method, full, _outputs(outputs), batch is not None),
            race=need_bool("race", race),
            max_iters=None if max_iters is None else need_int("max_iters", max_iters, 1),
            retries=need_int("retries", retries, 0),
            on_error=on_error,
            batch=batch,
            where=place,
        )
        made = Interface(self, spec, groups)
        self._graph._interfaces.append(made)
        return made

    def __repr__(self) -> str:
        return f"<role {self._spec.name}>"


class Use:
    """Another graph inlined into this one; its outputs are attributes: `enc.embedding` or `enc["embedding"]`."""

    __slots__ = ("_bind", "_graph", "_name", "_other", "_where")

    def __init__(self, graph: Graph, other: Graph, name: str, bind: Mapping[str, Field], place: str) -> None:
        self._graph, self._other, self._name, self._bind, self._where = graph, other, name, dict(bind), place

    def __getitem__(self, name: str) -> Input:
        slot = self._other._outputs.get(name)
        if slot is None:
            raise UnknownName(f"{self._name} (graph {self._other.name!r})", name, list(self._other._outputs))
        return self._outside(slot, name)

    def __getattr__(self, name: str) -> Input:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __dir__(self) -> list[str]:
        return list(self._other._outputs)

    def __repr__(self) -> str:
        return f"<use {self._name} of graph {self._other.name!r}>"

    def _outside(self, slot: Slot, name: str) -> Input:
        """An output of the used graph as an input of this one: a field where it is plain, else its slot."""
        field = self._field(slot.field, name)
        if slot.join is Join.PLAIN and not slot.optional and not slot.ordered:
            return field
        over = self._field(slot.over) if isinstance(slot.over, Field) else slot.over
        n = self._field(slot.n) if isinstance(slot.n, Field) else slot.n
        return replace(slot, field=field, name=name, over=over, n=n)

    def _field(self, field: Field, name: str | None = None) -> Field:
        bound = self._bind.get(field.id) if any(f is field for _, f in self._other._placeholders) else None
        if bound is not None:
            return replace(bound, name=name or bound.name)
        return Field(self._graph, f"{self._name}/{field.id}", name or field.name, field.type, field.stream)


class Graph:
    """Collects the declarations of one graph."""

    def __init__(self, name: str) -> None:
        self.name = need_str("name", name)
        self._where = where()
        self._placeholders: list[tuple[PlaceholderSpec, Field]] = []
        self._params: list[Param] = []
        self._roles: list[Role] = []
        self._interfaces: list[Interface] = []
        self._feedback: list[tuple[Feedback, str]] = []
        self._bound: dict[str, Field] = {}
        self._outputs: dict[str, Slot] = {}
        self._uses: list[Use] = []
        self._findings: list[Finding] = []

    def placeholder(self, name: str, type: object, stream: bool = False, required: bool = False) -> Field:
        """A field injected from outside with a request; `stream`: a sequence that the client keeps sending.

        A request without a `required` one is refused; any other that is not sent is absent.
        """
        spec = PlaceholderSpec(
            need_str("name", name),
            need_bool("stream", stream),
            need_bool("required", required),
            need_type("type", type),
            where(),
        )
        made = Field(self, spec.name, spec.name, cast(Type, spec.type), spec.stream)
        self._placeholders.append((spec, made))
        return made

    def param(self, name: str, type: object, default: Any = None) -> Param:
        """A global parameter: one value per session, overridable per request; in every role `ctx.params.NAME`."""
        spec = ParamSpec(need_str("name", name), default, need_type("type", type), where())
        made = Param(self, spec)
        self._params.append(made)
        return made

    def role(
        self,
        name: str,
        cls: Callable[..., Any],
        *,
        init: Mapping[str, Any] | None = None,
        replicas: int = 1,
        balance: str | Balance = "least_loaded",
        stateful: bool = False,
    ) -> Role:
        """A computing unit: `cls(**init)` is made once per replica. `stateful`: a request stays on one replica.

        `balance`: the name of a strategy, or one with options, such as `cache_aware(load_weight=4)`.
        """
        if not callable(cls):
            raise DeclarationError("cls", "a class, or a function that makes an instance", cls)
        init = {} if init is None else init
        if not isinstance(init, Mapping) or not all(isinstance(k, str) for k in init):
            raise DeclarationError("init", "a dict of constructor arguments by name", init)
        spec = RoleSpec(
            need_str("name", name),
            cls,
            dict(init),
            need_int("replicas", replicas, 1),
            balance.name if isinstance(balance, Balance) else need_str("balance", balance),
            need_bool("stateful", stateful),
            where(),
            balance.options if isinstance(balance, Balance) else {},
        )
        made = Role(self, spec)
        self._roles.append(made)
        return made

    def feedback(self, name: str) -> Feedback:
        """The back edge of a loop: read it in a group of the head, `bind` it to the field the next iteration sees."""
        made = Feedback(self, need_str("name", name), name)
        self._feedback.append((made, where()))
        return made

    def use(self, other: Graph, name: str | None = None, bind: Mapping[str, Field] | None = None) -> Use:
        """Inline another graph under `name` (default: its own), binding its placeholders to fields of this graph.

        Roles of the same name, class and init are the same role: replicas are shared. Returns a handle with the other
        graph's outputs.
        """
        if not isinstance(other, Graph) or other is self:
            raise DeclarationError("other", "another Graph", other)
        bind = {} if bind is None else bind
        if not isinstance(bind, Mapping):
            raise DeclarationError("bind", "a dict of placeholder to field", bind)
        for key, value in bind.items():
            if not isinstance(value, Field) or isinstance(value, Feedback):
                raise DeclarationError(f"bind[{key!r}]", "a field of this graph", value)
        made = Use(self, other, need_str("name", other.name if name is None else name), bind, where())
        self._uses.append(made)
        return made

    def output(self, **fields: Input) -> None:
        """What the client receives, by name."""
        place = where()
        for name, value in fields.items():
            slot = as_slot(value, name, place)
            if name in self._outputs:
                self._duplicate("output", name, place)
            self._outputs[name] = slot

    def lower(self) -> GraphSpec:
        """The neutral form of what has been declared so far, uses inlined. `GraphError` only if uses go round."""
        return lower(self).spec

    def lint(self) -> list[Finding]:
        """All findings, errors and notes, of what has been declared so far."""
        return list(examine(self).findings)

    def compile(self, credit: int = DEFAULT_CREDIT) -> CompiledGraph:
        """Validate and return an immutable graph. Raises `GraphError` with every error found.

        `credit` is how many numbers of a stream its creator may have open (W).
        """
        return compile_graph(self, need_int("credit", credit, 1))

    def __repr__(self) -> str:
        return f"<graph {self.name!r}>"

    def _bind_feedback(self, feedback: Feedback, field: Field, place: str) -> None:
        if feedback.id in self._bound:
            self._duplicate("binding of feedback", feedback.id, place)
        self._bound[feedback.id] = field

    def _duplicate(self, kind: str, name: str, place: str) -> None:
        what = f"graph {self.name!r}: {kind} {name!r} is declared twice"
        self._findings.append(Finding("duplicate-name", what, "give each its own name", place))


def _groups(inputs: object, place: str) -> tuple[tuple[tuple[str, Slot], ...], ...]:
    if isinstance(inputs, (str, Field, Slot, Mapping)) or not isinstance(inputs, Sequence):
        raise DeclarationError("inputs", "a list of groups, each a list of slots", inputs)
    return tuple(_group(group, f"inputs[{i}]", place) for i, group in enumerate(inputs))


def _group(group: object, argument: str, place: str) -> tuple[tuple[str, Slot], ...]:
    if isinstance(group, (str, Field, Slot, Mapping)) or not isinstance(group, Sequence):
        raise DeclarationError(argument, "a group: a list of fields and dicts", group)
    slots: list[tuple[str, Slot]] = []
    for j, item in enumerate(group):
        if isinstance(item, Mapping):
            for param, value in item.items():
                key = f"{argument}[{j}][{param!r}]"
                slots.append((need_str(key, param), as_slot(value, key, place)))
        else:
            slot = as_slot(item, f"{argument}[{j}]", place)
            slots.append((slot.name, slot))
    return tuple(slots)


def _outputs(outputs: object) -> list[OutputSpec]:
    if isinstance(outputs, (str, Mapping, StreamOutput)) or not isinstance(outputs, Sequence):
        raise DeclarationError("outputs", 'a list of names and stream("name")', outputs)
    found: list[OutputSpec] = []
    for i, item in enumerate(outputs):
        if isinstance(item, StreamOutput):
            found.append(OutputSpec(item.name, item.name, True, item.type))
        elif isinstance(item, Mapping):
            for name, type_ in item.items():
                key = f"outputs[{i}][{name!r}]"
                found.append(OutputSpec(need_str(key, name), name, False, need_type(key, type_)))
        else:
            name = need_str(f"outputs[{i}]", item)
            found.append(OutputSpec(name, name))
    return found
