"""The compiled form of a graph: what each replica holds to run its part without a conductor.

Everything is indexed by small integers, since messages name fields and sources by index: a *field* is what is read,
a *source* is what creates numbers (a stream output, a streamed placeholder, a loop, a window). A path is a tuple of
numbers; which source each number belongs to is the field's scope, so it never travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NewType

from omni_flow.control.spec import Count, GraphSpec, InterfaceSpec, Join, RoleSpec, WindowPolicy

FieldId = NewType("FieldId", int)
SourceId = NewType("SourceId", int)
RoleId = NewType("RoleId", int)
InterfaceId = NewType("InterfaceId", int)

Path = tuple[int, ...]
Scope = tuple[SourceId, ...]

ONLY = (0,)

GATEWAY = -1
"""Stands for the gateway where a role or a creator's interface is named."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a message about a path goes among the shares of one role.

    `cuts` are lengths: for each, the message goes to the share that `share_of(path[:cut])` names. `everyone`: at least
    one reading slot has a prefix shorter than its route key, so the whole list gets it. `interfaces` are the readers.
    """

    role: RoleId
    cuts: tuple[int, ...]
    everyone: bool
    interfaces: tuple[InterfaceId, ...]

    def targets(self, path: Path, shares: int) -> Iterable[int]:
        """The shares, of `shares` in all, that a message about `path` goes to."""
        if shares == 1:
            return ONLY
        if self.everyone:
            return range(shares)
        if len(self.cuts) == 1:
            return (share_of(path[: self.cuts[0]], shares),)
        return {share_of(path[:cut], shares) for cut in self.cuts}


@dataclass(frozen=True, slots=True)
class CreditReader:
    """Someone whose acknowledgement closes a number. `interface` is GATEWAY for a graph output.

    `everyone`: each share of the reader's role acknowledges, else exactly one does.
    """

    interface: int
    output: int
    role: int
    everyone: bool


@dataclass(frozen=True, slots=True)
class Source:
    """What creates numbers. `scope` is the scope of the path it creates under (its parent's).

    `creator` is the interface that creates (GATEWAY for a streamed placeholder), `kind` how. `readers` are those waited
    for (empty: no credit applies), `spooled` those that read without being waited for. `at_least` is the smallest
    credit that lets every window over it fill.
    """

    id: SourceId
    name: str
    kind: str
    creator: int
    scope: Scope
    ends: tuple[Route, ...]
    ends_to_gateway: bool
    readers: tuple[CreditReader, ...]
    spooled: tuple[CreditReader, ...]
    at_least: int


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `producer` is an interface, or GATEWAY for a placeholder; `source` is set for a stream."""

    id: FieldId
    name: str
    producer: int
    output: str
    scope: Scope
    source: SourceId | None
    routes: tuple[Route, ...]
    to_gateway: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """One thing an interface gathers. Slots of different groups that read the same are one `Slot`.

    `depth` is the length of the slot's scope, `field_depth` that of the field's. A closing join takes off `levels`
    sources. `n_slot` is the index of the slot that holds n when n is a field. `back`: a feedback slot.
    """

    index: int
    field: FieldId
    join: Join
    depth: int
    field_depth: int
    levels: int
    n: Count
    n_slot: int | None
    size: int
    stride: int
    left: int
    policy: WindowPolicy | None
    back: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A slot's place in a group: the parameter it is bound to, and whether it may be absent."""

    slot: int
    param: str
    optional: bool
    depth: int


@dataclass(frozen=True, slots=True)
class Output:
    """One output of an interface, in the order of its index in `Interface.outputs`."""

    name: str
    field: FieldId
    source: SourceId | None


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface with its scope, groups and slots.

    `route` is the length of the route key. `first` are the groups of iteration 0 (all groups of an interface that is no
    head), `later` those of iterations >= 1. `loop`/`window` are the sources it creates as head or by its window slot.
    `index` is its place among the interfaces of its role. `entry_slots`: what opens iteration 0.
    `count_users[s]`: the count slots whose n is slot s. `acks[k]`: the source of the path's k-th number, if its creator
    waits for this interface; `acks_frames`: whether the creator of the windowed frames does.
    """

    id: InterfaceId
    index: int
    name: str
    role: RoleId
    scope: Scope
    route: int
    slots: tuple[Slot, ...]
    groups: tuple[tuple[Entry, ...], ...]
    first: tuple[int, ...]
    later: tuple[int, ...]
    outputs: tuple[Output, ...]
    loop: SourceId | None
    window: SourceId | None
    window_slot: int | None
    ordered: bool
    race: bool
    max_iters: int
    entry_slots: frozenset[int]
    count_users: Mapping[int, tuple[int, ...]]
    acks: tuple[SourceId | None, ...]
    acks_frames: bool
    spec: InterfaceSpec

    @property
    def depth(self) -> int:
        """Length of an activation's path."""
        return len(self.scope)


@dataclass(frozen=True, slots=True)
class EndReader:
    """What one interface does with the end of a source: it counts activations, or a join of `slot` needs it."""

    interface: int
    scope: bool
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RolePlan:
    """A role with the tables its shares dispatch by. Indices in the tables are places in `interfaces`."""

    id: RoleId
    spec: RoleSpec
    interfaces: tuple[InterfaceId, ...]
    members: tuple[Interface, ...]
    facts: Mapping[int, tuple[tuple[int, Slot], ...]]
    ends: Mapping[int, tuple[EndReader, ...]]
    retriable: bool


@dataclass(frozen=True, slots=True)
class ClientOutput:
    """What the client receives: a slot without an interface. A hidden one is awaited, not delivered."""

    index: int
    name: str
    field: FieldId
    join: Join
    depth: int
    levels: int
    n: Count
    n_field: FieldId | None
    scope: Scope
    hidden: bool

    @property
    def label(self) -> str:
        """What failures call it: a hidden one by the interface that it stands for."""
        return self.name.rpartition(".")[0] if self.hidden else self.name


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled graph. `credit` is W, the numbers a creator may have open per parent."""

    spec: GraphSpec
    credit: int
    roles: tuple[RolePlan, ...]
    interfaces: tuple[Interface, ...]
    fields: tuple[Field, ...]
    sources: tuple[Source, ...]
    outputs: tuple[ClientOutput, ...]
    field_ids: Mapping[str, FieldId]
    source_ids: Mapping[str, SourceId]

    def show(self, scope: Scope, path: Path) -> str:
        """A path as logs print it: `llm.codes#12/tts@win#0`."""
        return "/".join(f"{self.sources[s].name}#{n}" for s, n in zip(scope, path, strict=True))


def share_of(path: Path, shares: int) -> int:
    """Which of `shares` shares owns a route key. The same in every process and on every machine."""
    mixed = 0
    for number in path:
        mixed = (mixed * 1_000_003 + number) & 0xFFFFFFFF
    return mixed % shares
