"""Fields and the input policies that turn them into slots: `optional`, `collect`, `count`, `last`, `window`, `ordered`.

All of them are pure descriptions; what they mean at run time is the business of the joins. They compose from the
inside out: a join around a field, `ordered` around that, `optional` around all (`optional(collect(x))`,
`ordered(window(x, 4))`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from omni_flow.control.annotation import as_type
from omni_flow.control.declare import DeclarationError, need_int, need_str, where
from omni_flow.control.spec import BatchSpec, Join, ParamSpec, WindowPolicy
from omni_flow.control.types import Type

if TYPE_CHECKING:
    from omni_flow.control.graph import Graph

Batch = BatchSpec


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A value of a graph: a placeholder, or an output of an interface.

    `id` is unique in `graph` (`llm.chat.token`); `name` is the parameter it binds to when a slot names none.
    """

    graph: Graph = field(repr=False)
    id: str
    name: str
    type: Type | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Feedback(Field):
    """The back edge of a loop: a field that is bound after the interface that makes it has been declared."""

    def bind(self, field: Field) -> None:
        """Say which field the next iteration sees here. A second call is a finding (`duplicate-name`)."""
        if not isinstance(field, Field) or isinstance(field, Feedback):
            raise DeclarationError("field", "an output of an interface", field)
        self.graph._bind_feedback(self, field, where())


@dataclass(frozen=True, slots=True, eq=False)
class Param:
    """A global parameter of a graph; usable as the `n` of `count`. In a role it is `ctx.params.NAME`."""

    graph: Graph = field(repr=False)
    spec: ParamSpec

    @property
    def name(self) -> str:
        """The name under which roles and requests know it."""
        return self.spec.name


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One input of a group before lowering: a field and how it is joined."""

    field: Field
    name: str
    where: str
    join: Join = Join.PLAIN
    optional: bool = False
    ordered: bool = False
    over: Field | str | None = None
    n: int | str | Param | Field = "all"
    size: int = 1
    stride: int = 1
    left: int = 0
    policy: WindowPolicy | None = None


Input = Field | Slot


def as_slot(value: object, argument: str, place: str) -> Slot:
    """A field or slot as a slot; anything else is a `DeclarationError` that names `argument`."""
    if isinstance(value, Slot):
        return value
    if isinstance(value, Field):
        return Slot(value, value.name, place)
    raise DeclarationError(
        argument, "a field of the graph, or optional, collect, count, last, window, ordered of one", value
    )


def optional(f: Input) -> Slot:
    """A slot that may be absent: the method's default stands in (the parameter must have one)."""
    return replace(as_slot(f, "f", where()), optional=True)


def collect(f: Input, *, over: Field | str | None = None) -> Slot:
    """The whole stream as a list; never empty, absent instead.

    `over` names an outer stream (its field, or its name): that stream and all inside it are collected, in path order.
    """
    return replace(_plain(f, "collect"), join=Join.COLLECT, over=_over(over), where=where())


def last(f: Input, *, over: Field | str | None = None) -> Slot:
    """The last present value of a stream or loop. `over` as in `collect`."""
    return replace(_plain(f, "last"), join=Join.LAST, over=_over(over), where=where())


def count(f: Input, n: int | str | Param | Field, *, over: Field | str | None = None) -> Slot:
    """The first `n` present values of a stream, as soon as they are known ("activate by count").

    `n` is an int, a param of the graph (or its name), another field visible in the slot's scope, or "all".
    """
    if isinstance(n, bool) or not isinstance(n, (int, str, Param, Field)) or n == "":
        raise DeclarationError("n", 'an int, a param, a field or "all"', n)
    return replace(_plain(f, "count"), join=Join.COUNT, n=n, over=_over(over), where=where())


def window(
    f: Input,
    size: int | None = None,
    stride: int | None = None,
    left_context: int = 0,
    *,
    policy: WindowPolicy | None = None,
) -> Slot:
    """A stream cut into lists: each `stride` frames one of `size`, `left_context` frames before it; or by `policy`.

    `stride` defaults to `size`. A policy brings its own size (`max_frames`) and excludes `size` and `stride`.
    """
    base = replace(_plain(f, "window"), join=Join.WINDOW, left=need_int("left_context", left_context, 0), where=where())
    if policy is None:
        if size is None:
            raise DeclarationError("size", "the frames of a window, or a policy", size)
        step = size if stride is None else stride
        return replace(base, size=need_int("size", size, 1), stride=need_int("stride", step, 1))
    if size is not None or stride is not None:
        raise DeclarationError(
            "size", "nothing beside a policy, which cuts by itself", size if stride is None else stride
        )
    if isinstance(policy, type) or not isinstance(policy, WindowPolicy):
        raise DeclarationError("policy", "an object with max_frames and cut(frames, start, ended)", policy)
    frames = need_int("policy.max_frames", policy.max_frames, 1)
    return replace(base, size=frames, stride=frames, policy=policy)


def ordered(f: Input) -> Slot:
    """Activations under one parent run one after the other, in the order of their numbers, on one replica."""
    slot = as_slot(f, "f", where())
    if slot.join not in (Join.PLAIN, Join.WINDOW):
        raise DeclarationError(
            "f", "a field or a window: a join that closes the stream has nothing to order", slot.join.value
        )
    return replace(slot, ordered=True)


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """An output that is a sequence of frames; `type` is that of one frame (default: from the method's annotation)."""

    name: str
    type: Type | None = None


def stream(name: str, type: object = None) -> StreamOutput:
    """In `outputs`: zero or more frames and an end."""
    return StreamOutput(need_str("name", name), None if type is None else need_type("type", type))


def need_type(argument: str, value: object) -> Type:
    """The type that `value` states; else `DeclarationError`."""
    found = as_type(value) if value is None or _hashable(value) else None
    if found is None:
        raise DeclarationError(
            argument, "a type (Text, Bytes, Image, Audio, Tensor, ..., a Struct or model class)", value
        )
    return found


def _hashable(value: object) -> bool:
    return cast(Any, type(value)).__hash__ is not None


def _plain(f: Input, join: Literal["collect", "count", "last", "window"]) -> Slot:
    slot = as_slot(f, "f", "")
    if slot.join is not Join.PLAIN:
        inner = slot.join.value
        what = f"a field: {join} of a {inner} needs an interface between them (over= closes several levels at once)"
        raise DeclarationError("f", what, inner)
    if slot.optional or slot.ordered:
        outer = "optional" if slot.optional else "ordered"
        raise DeclarationError("f", f"a field: write {outer}({join}(...)), not {join}({outer}(...))", outer)
    return slot


def _over(value: object) -> Field | str | None:
    if value is not None and not isinstance(value, (Field, str)):
        raise DeclarationError("over", "a stream field, or the name of one", value)
    return value
