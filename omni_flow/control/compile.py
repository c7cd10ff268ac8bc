"""From the neutral form to a `Plan`: scopes, lint, spool rule, routes and dispatch tables.

`compile_spec` is the one entry. Pure; equal specs give equal plans, so each process may compile for itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from omni_flow.control.findings import Finding, GraphError
from omni_flow.control.plan import (
    GATEWAY,
    ClientOutput,
    CreditReader,
    EndReader,
    Entry,
    Field,
    FieldId,
    Interface,
    InterfaceId,
    Output,
    Plan,
    RoleId,
    RolePlan,
    Route,
    Scope,
    Slot,
    Source,
    SourceId,
)
from omni_flow.control.rules import check
from omni_flow.control.scopes import CLOSING, Names, Scopes, infer, levels_of, loop_source, slots_of, window_source
from omni_flow.control.spec import FieldRef, GraphSpec, InterfaceSpec, Join, OutputSpec, RoleSpec, SlotSpec
from omni_flow.control.spool import Reader, readers_of, spooled

DEFAULT_CREDIT: Final = 64
"""W: numbers that a creator may have open per parent."""

DONE: Final = "!done"
"""Name of the hidden output of an interface without outputs."""


def lint_spec(spec: GraphSpec, credit: int = DEFAULT_CREDIT) -> list[Finding]:
    """All errors of scopes, loops, joins and windows. Roles and types are judged by `lint/`."""
    scopes = infer(_with_hidden(spec))
    return [*scopes.findings, *check(scopes, credit)]


def compile_spec(spec: GraphSpec, credit: int = DEFAULT_CREDIT) -> Plan:
    """Compile `spec` with W = `credit`.

    Raises:
        GraphError: with every error found.
    """
    if credit < 1:
        raise ValueError(f"credit is {credit}; a creator needs at least one open number")
    full = _with_hidden(spec)
    scopes = infer(full)
    findings = [*scopes.findings, *check(scopes, credit)]
    if findings:
        raise GraphError(spec.name, findings)
    return _Compiler(full, scopes, credit).plan()


def _with_hidden(spec: GraphSpec) -> GraphSpec:
    """Give each interface without outputs a hidden one that the gateway awaits."""
    outputs = dict(spec.outputs)
    interfaces = []
    for interface in spec.interfaces:
        if not interface.outputs:
            name = f"{interface.name}.{DONE}"
            interface = InterfaceSpec(
                name=interface.name,
                role=interface.role,
                method=interface.method,
                groups=interface.groups,
                outputs=(OutputSpec(DONE, name),),
                race=interface.race,
                max_iters=interface.max_iters,
                retries=interface.retries,
                on_error=interface.on_error,
                batch=interface.batch,
                where=interface.where,
            )
            outputs[name] = SlotSpec(name, name, where=interface.where)
        interfaces.append(interface)
    return GraphSpec(
        name=spec.name,
        placeholders=spec.placeholders,
        params=spec.params,
        roles=spec.roles,
        interfaces=tuple(interfaces),
        feedback=spec.feedback,
        outputs=outputs,
        uses=spec.uses,
        where=spec.where,
    )


class _Compiler:
    """Turns names into indices. One use."""

    def __init__(self, spec: GraphSpec, scopes: Scopes, credit: int) -> None:
        self.spec = spec
        self.scopes = scopes
        self.credit = credit
        self.spooled = spooled(scopes)
        names = [i.name for i in spec.interfaces]
        self.interface_ids = {name: InterfaceId(k) for k, name in enumerate(names)}
        self.field_ids = {name: FieldId(k) for k, name in enumerate(scopes.producer)}
        self.source_ids = {name: SourceId(k) for k, name in enumerate(self._source_names())}
        roles = {r.name: r for r in spec.roles}
        for interface in spec.interfaces:
            roles.setdefault(interface.role, RoleSpec(interface.role))
        self.roles = roles
        self.role_ids = {name: RoleId(k) for k, name in enumerate(roles)}
        self.interfaces: list[Interface] = []

    def _source_names(self) -> list[str]:
        found: dict[str, None] = {}
        for scope in (*self.scopes.fields.values(), *self.scopes.interfaces.values()):
            found.update(dict.fromkeys(scope))
        return list(found)

    def plan(self) -> Plan:
        places: dict[str, int] = defaultdict(int)
        for spec in self.spec.interfaces:
            self.interfaces.append(self._interface(spec, places[spec.role]))
            places[spec.role] += 1
        outputs = tuple(self._output(k, name, slot) for k, (name, slot) in enumerate(self.spec.outputs.items()))
        return Plan(
            spec=self.spec,
            credit=self.credit,
            roles=tuple(self._role(name) for name in self.roles),
            interfaces=tuple(self.interfaces),
            fields=tuple(self._field(name, outputs) for name in self.field_ids),
            sources=self._sources(outputs),
            outputs=outputs,
            field_ids=self.field_ids,
            source_ids=self.source_ids,
        )

    def _scope(self, names: Names) -> Scope:
        return tuple(self.source_ids[n] for n in names)

    def _interface(self, spec: InterfaceSpec, index: int) -> Interface:
        names = self.scopes.interfaces[spec.name]
        head = self.scopes.is_head(spec)
        windowed = window_source(spec.name) in names
        ordered = any(s.ordered for s in slots_of(spec))
        slots: list[Slot] = []
        keys: dict[tuple[object, ...], int] = {}
        groups = []
        for group in spec.groups:
            entries = []
            for slot in group:
                k = self._slot(spec, slot, slots, keys)
                entries.append(Entry(k, slot.param, slot.optional, slots[k].depth))
            groups.append(tuple(entries))
        later = tuple(k for k, g in enumerate(spec.groups) if any(self.scopes.is_back(s) for s in g))
        first = tuple(k for k in range(len(groups)) if k not in later)
        source = {o.field: self.source_ids[o.field] for o in spec.outputs if o.stream}
        return Interface(
            id=self.interface_ids[spec.name],
            index=index,
            name=spec.name,
            role=self.role_ids[spec.role],
            scope=self._scope(names),
            route=len(names) - 1 if head or windowed or (ordered and names) else len(names),
            slots=tuple(slots),
            groups=tuple(groups),
            first=first,
            later=later,
            outputs=tuple(Output(o.name, self.field_ids[o.field], source.get(o.field)) for o in spec.outputs),
            loop=self.source_ids[loop_source(spec.name)] if head else None,
            window=self.source_ids[window_source(spec.name)] if windowed else None,
            window_slot=next((s.index for s in slots if s.join is Join.WINDOW), None),
            ordered=ordered,
            race=spec.race,
            max_iters=spec.max_iters or 0,
            entry_slots=frozenset(e.slot for k in first for e in groups[k]) if head else frozenset(),
            count_users=_count_users(slots),
            acks=tuple(self.source_ids[s] if self._waited(spec, s) else None for s in names),
            acks_frames=any(
                self._waited(spec, self.scopes.closed(s)[0]) for s in slots_of(spec) if s.join is Join.WINDOW
            ),
            spec=spec,
        )

    def _waited(self, interface: InterfaceSpec, source: str) -> bool:
        """Whether the creator of `source` waits for `interface`, which reads under it or windows it."""
        return not source.endswith("@loop") and (Reader(interface.name, None), source) not in self.spooled

    def _slot(
        self, interface: InterfaceSpec, slot: SlotSpec, slots: list[Slot], keys: dict[tuple[object, ...], int]
    ) -> int:
        """Index of the slot that gathers what `slot` reads, made if no other group reads the same."""
        target = self.scopes.target(slot)
        assert target is not None
        back = self.scopes.is_back(slot)
        depth = len(self.scopes.slot_scope(interface, slot) or ())
        levels = levels_of(slot, self.scopes.fields[target]) if slot.join in CLOSING else 0
        key = (target, back, _effective(slot), levels, slot.n, slot.size, slot.stride, slot.left, id(slot.policy))
        if key in keys:
            return keys[key]
        n_slot = None
        if slot.join is Join.COUNT and isinstance(slot.n, FieldRef):
            n_slot = self._slot(interface, SlotSpec(slot.n.name, slot.n.name), slots, keys)
        keys[key] = len(slots)
        slots.append(
            Slot(
                index=len(slots),
                field=self.field_ids[target],
                join=_effective(slot),
                depth=depth,
                field_depth=len(self.scopes.fields[target]),
                levels=levels,
                n=slot.n,
                n_slot=n_slot,
                size=slot.policy.max_frames if slot.policy is not None else slot.size,
                stride=slot.stride,
                left=slot.left,
                policy=slot.policy,
                back=back,
            )
        )
        return len(slots) - 1

    def _output(self, index: int, name: str, slot: SlotSpec) -> ClientOutput:
        field_scope = self.scopes.fields[slot.field]
        levels = levels_of(slot, field_scope) if slot.join in CLOSING else 0
        n_field = self.field_ids[slot.n.name] if slot.join is Join.COUNT and isinstance(slot.n, FieldRef) else None
        return ClientOutput(
            index=index,
            name=name,
            field=self.field_ids[slot.field],
            join=_effective(slot),
            depth=len(field_scope) - levels,
            levels=levels,
            n=slot.n,
            n_field=n_field,
            scope=self._scope(field_scope),
            hidden=name.endswith(DONE),
        )

    def _field(self, name: str, outputs: tuple[ClientOutput, ...]) -> Field:
        fid = self.field_ids[name]
        producer = self.scopes.producer[name]
        source = self.source_ids.get(name) if self.scopes.is_stream(name) else None
        if source is None and self.scopes.is_stream(name):
            raise AssertionError(f"stream {name!r} has no source")
        wants: dict[RoleId, list[tuple[Interface, int]]] = defaultdict(list)
        for interface in self.interfaces:
            for slot in interface.slots:
                if slot.field == fid:
                    wants[interface.role].append((interface, slot.depth))
        return Field(
            id=fid,
            name=name,
            producer=GATEWAY if producer is None else self.interface_ids[producer.name],
            output="" if producer is None else self.scopes.output_of[name].name,
            scope=self._scope(self.scopes.fields[name]),
            source=source,
            routes=_routes(wants),
            to_gateway=any(fid in (o.field, o.n_field) for o in outputs),
        )

    def _sources(self, outputs: tuple[ClientOutput, ...]) -> tuple[Source, ...]:
        return tuple(self._source(name, outputs) for name in self.source_ids)

    def _source(self, name: str, outputs: tuple[ClientOutput, ...]) -> Source:
        sid = self.source_ids[name]
        kind, creator, parent = self._creator(name)
        wants: dict[RoleId, list[tuple[Interface, int]]] = defaultdict(list)
        at_least = 1
        for interface in self.interfaces:
            if sid in interface.scope:
                wants[interface.role].append((interface, len(parent)))
            for slot in interface.slots:
                scope = self._field_scope(slot)
                if sid in scope:
                    wants[interface.role].append((interface, min(len(parent), slot.depth)))
                if slot.join is Join.WINDOW and scope[-1] == sid:
                    # A window waits with up to one frame less than it needs. Several may wait with different ones,
                    # since frames that are absent for one are present for another.
                    at_least += slot.size + slot.left - 1
        waited: list[CreditReader] = []
        free: list[CreditReader] = []
        if kind != "loop":
            for reader in readers_of(self.scopes, name):
                (free if (reader, name) in self.spooled else waited).append(self._reader(reader, len(parent)))
        return Source(
            id=sid,
            name=name,
            kind=kind,
            creator=creator,
            scope=self._scope(parent),
            ends=_routes(wants),
            ends_to_gateway=any(sid in o.scope for o in outputs),
            readers=tuple(waited),
            spooled=tuple(free),
            at_least=at_least,
        )

    def _field_scope(self, slot: Slot) -> Scope:
        name = next(n for n, k in self.field_ids.items() if k == slot.field)
        return self._scope(self.scopes.fields[name])

    def _creator(self, name: str) -> tuple[str, int, Names]:
        """Kind, creating interface and parent scope of a source."""
        if name in self.scopes.producer:
            producer = self.scopes.producer[name]
            if producer is None:
                return "placeholder", GATEWAY, ()
            return "stream", self.interface_ids[producer.name], self.scopes.fields[name][:-1]
        owner, kind = name.rsplit("@", 1)
        return ("loop" if kind == "loop" else "window"), self.interface_ids[owner], self.scopes.interfaces[owner][:-1]

    def _reader(self, reader: Reader, parent: int) -> CreditReader:
        if reader.interface is None:
            assert reader.output is not None
            return CreditReader(GATEWAY, list(self.spec.outputs).index(reader.output), GATEWAY, everyone=False)
        interface = self.interfaces[self.interface_ids[reader.interface]]
        return CreditReader(interface.id, 0, interface.role, everyone=interface.route > parent + 1)

    def _role(self, name: str) -> RolePlan:
        rid = self.role_ids[name]
        own = [i for i in self.interfaces if i.role == rid]
        facts: dict[int, list[tuple[int, Slot]]] = defaultdict(list)
        ends: dict[int, list[EndReader]] = defaultdict(list)
        for interface in own:
            in_scope = set(interface.scope)
            joins: dict[SourceId, list[int]] = defaultdict(list)
            for slot in interface.slots:
                facts[slot.field].append((interface.index, slot))
                if slot.join is Join.PLAIN:
                    continue
                scope = self._field_scope(slot)
                closed = scope[slot.depth :] if slot.join is not Join.WINDOW else scope[-1:]
                for source in closed:
                    joins[source].append(slot.index)
            for sid in {*in_scope, *joins}:
                ends[sid].append(EndReader(interface.index, sid in in_scope, tuple(joins.get(sid, ()))))
        return RolePlan(
            id=rid,
            spec=self.roles[name],
            interfaces=tuple(i.id for i in own),
            members=tuple(own),
            facts={k: tuple(v) for k, v in facts.items()},
            ends={k: tuple(v) for k, v in ends.items()},
            retriable=all(i.spec.retries > 0 for i in own),
        )


def _effective(slot: SlotSpec) -> Join:
    """The join a slot comes to: a count of "all" is collect. The word in a field or param is no number of values."""
    return Join.COLLECT if slot.join is Join.COUNT and slot.n == "all" else slot.join


def _count_users(slots: list[Slot]) -> dict[int, tuple[int, ...]]:
    users: dict[int, list[int]] = defaultdict(list)
    for slot in slots:
        if slot.n_slot is not None:
            users[slot.n_slot].append(slot.index)
    return {k: tuple(v) for k, v in users.items()}


def _routes(wants: dict[RoleId, list[tuple[Interface, int]]]) -> tuple[Route, ...]:
    """One route per role. A want is an interface and the length of the prefix that is known of the message's path."""
    found = []
    for role, readers in wants.items():
        cuts = {i.route for i, known in readers if i.route <= known}
        everyone = any(i.route > known for i, known in readers)
        interfaces = tuple(sorted({i.id for i, _ in readers}))
        found.append(Route(role, tuple(sorted(cuts)), everyone, interfaces))
    return tuple(found)
