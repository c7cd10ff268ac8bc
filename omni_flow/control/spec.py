"""The neutral form of a graph: what the DSL collects and what the compiler reads.

Plain data, no behaviour beyond small conveniences. Field and interface names are opaque strings here; the DSL makes
them `[use/]role.interface.output` and `[use/]role.interface`. Every declaration carries `where` ("file:line") so that a
finding can name its place. Terms follow the documentation of the control flow: path, scope, slot, group, source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable


class Join(StrEnum):
    """How a slot turns the facts of a field into one input of an activation."""

    PLAIN = "plain"
    COLLECT = "collect"
    COUNT = "count"
    LAST = "last"
    WINDOW = "window"


@runtime_checkable
class WindowPolicy(Protocol):
    """Where a stream is cut into windows. A pure object: it keeps no state between calls.

    `cut(frames, start, ended)` looks at the present frames in order and says where the window that begins at index
    `start` stops (exclusive, `start < stop <= len(frames)`), or None for "not yet". It is asked once for each frame
    that arrives in order with `ended=False`, and after the stream's end with `ended=True`; then None means "the rest".
    It must cut at `max_frames`. `timed=True` marks a policy that also looks at a clock, which counts as `race`.
    """

    @property
    def max_frames(self) -> int: ...

    def cut(self, frames: Sequence[Any], start: int, ended: bool) -> int | None: ...


@dataclass(frozen=True, slots=True)
class ParamRef:
    """The value of a global parameter, taken from the request's snapshot."""

    name: str


@dataclass(frozen=True, slots=True)
class FieldRef:
    """The value of a field visible in the slot's scope."""

    name: str


Count = int | ParamRef | FieldRef | Literal["all"]


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """One input of a group.

    `field` is the field read, or the name of a feedback declaration (a back edge). A closing join (`collect`, `count`,
    `last`) removes `levels` sources from the end of the field's scope; with `over` (a source, or the last part of its
    name) that source and all after it. `ordered` goes with a plain slot or a window. `size`, `stride`, `left` (left
    context) and `policy` belong to a window; with a policy, `size` is the policy's `max_frames`.
    """

    field: str
    param: str
    optional: bool = False
    join: Join = Join.PLAIN
    ordered: bool = False
    levels: int = 1
    n: Count = "all"
    size: int = 1
    stride: int = 1
    left: int = 0
    policy: WindowPolicy | None = None
    where: str = ""
    over: str | None = None


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One output of an interface. `name` is what role code says, `field` what readers name."""

    name: str
    field: str
    stream: bool = False
    type: Any = None


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Dynamic batching: at most `max` activations in one call, waiting at most `wait_ms` for more."""

    max: int
    wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class InterfaceSpec:
    """One entry point of a role in this graph. `name` includes the graph uses (`enc2/encode`)."""

    name: str
    role: str
    method: str
    groups: tuple[tuple[SlotSpec, ...], ...]
    outputs: tuple[OutputSpec, ...] = ()
    race: bool = False
    max_iters: int | None = None
    retries: int = 0
    on_error: Literal["fail", "absent"] = "fail"
    batch: BatchSpec | None = None
    where: str = ""


@dataclass(frozen=True, slots=True)
class PlaceholderSpec:
    """A field injected from outside with a request; `stream`: a sequence the client keeps sending."""

    name: str
    stream: bool = False
    required: bool = False
    type: Any = None
    where: str = ""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A global parameter: one value per session, overridable per request, a snapshot per request."""

    name: str
    default: Any = None
    type: Any = None
    where: str = ""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A computing unit, deployed as replicas. `factory` makes an instance from `init`.

    `balance_options`: arguments of the strategy that `balance` names.
    """

    name: str
    factory: Callable[..., Any] | None = None
    init: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1
    balance: str = "least_loaded"
    stateful: bool = False
    where: str = ""
    balance_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UseSpec:
    """A cross-graph reference, already inlined; kept so that lint can name unbound or streamed placeholders.

    `bind` maps a placeholder of the used graph to a field of this one. `unbound` and `streamed` list placeholders of
    the used graph that are not bound, or that are streamed, which cannot be bound.
    """

    name: str
    graph: str
    bind: Mapping[str, str]
    unbound: tuple[str, ...] = ()
    streamed: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """A whole graph. `feedback` maps the name of a back edge to the field bound to it (None: never bound)."""

    name: str
    placeholders: tuple[PlaceholderSpec, ...] = ()
    params: tuple[ParamSpec, ...] = ()
    roles: tuple[RoleSpec, ...] = ()
    interfaces: tuple[InterfaceSpec, ...] = ()
    feedback: Mapping[str, str | None] = field(default_factory=dict)
    outputs: Mapping[str, SlotSpec] = field(default_factory=dict)
    uses: tuple[UseSpec, ...] = ()
    where: str = ""
