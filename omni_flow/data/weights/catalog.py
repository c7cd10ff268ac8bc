"""Who loads a tensor, who holds it, and which version of a model's weights is current. Pure: time is passed in.

A tensor (key, version) is absent, being loaded under a grant, or sealed in a segment. A **grant** gives one session
all the absent tensors it asked for at once and room for them in one new segment; it ends sealed, or given up, or with
the session, and then the tensors are absent again and the next who asks is granted them. A **segment** is held by the
sessions that were told of it; when nobody holds it, it lingers, then goes with its tensors.

Versions: the first of a family is 0 and current at once. A later one is loaded beside it while everyone goes on with
the old; `switch` makes it current in one step, and only when it has every tensor that the current one has.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

from omni_flow.data.errors import BadArgument, BadToken, UnknownName
from omni_flow.data.messages import SHOWN_TEXT
from omni_flow.data.weights.errors import SwitchRefused
from omni_flow.data.weights.names import Family, ManifestEntry, TensorSpec, WeightKey, aligned

SessionId = NewType("SessionId", int)
SegmentId = NewType("SegmentId", int)
Versioned = tuple[WeightKey, int]


@dataclass(slots=True)
class Grant:
    """The right and the duty to load: `specs[i]` goes to `offsets[i]` of the segment."""

    token: int
    session: SessionId
    segment: SegmentId
    family: Family
    version: int
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int
    device: int


@dataclass(slots=True)
class Segment:
    """A piece of memory with sealed tensors. `holders` counts per session; `idle_since` is set while there are none."""

    id: SegmentId
    nbytes: int
    device: int
    keys: tuple[Versioned, ...]
    holders: "Counter[SessionId]" = field(default_factory=Counter)


@dataclass(slots=True)
class Answer:
    """To one ask: the sealed tensors (now held by the asker), a grant for those absent, and the number of those that
    another session is loading."""

    version: int
    ready: list[ManifestEntry]
    grant: Grant | None
    loading: int


class Catalog:
    """The state machine. Methods that can free memory return the segments that are gone."""

    def __init__(self, linger_s: float) -> None:
        self.linger_s = linger_s
        self._sealed: dict[Versioned, ManifestEntry] = {}
        self._loading: dict[Versioned, int] = {}
        self._grants: dict[int, Grant] = {}
        self._segments: dict[SegmentId, Segment] = {}
        self._idle: OrderedDict[SegmentId, float] = OrderedDict()
        self._current: dict[Family, int] = {}
        self._members: dict[tuple[Family, int], dict[WeightKey, None]] = {}
        self._next_token = 1
        self._next_segment = 1

    def current(self, family: Family) -> int:
        """The version that `ask` without one gets; 0 before the first switch."""
        return self._current.get(family, 0)

    def blocked(
        self, family: Family, specs: Sequence[TensorSpec], version: int | None, *, may_load: bool, device: int = -1
    ) -> list[SessionId]:
        """The loaders the asker must wait for: empty when `ask` would give something to use or to load.

        An asker that may not load waits for absent tensors as well; that wait names nobody, so the list holds 0.
        Raises: as `ask`.
        """
        chosen = self.current(family) if version is None else version
        keys = [self._key(spec, family, chosen, device) for spec in specs]
        missing = [key for key in keys if key not in self._sealed]
        absent = [key for key in missing if key not in self._loading]
        if not missing or (absent and (may_load or chosen < self.current(family))):
            return []
        loaders = {self._grants[self._loading[key]].session for key in missing if key in self._loading}
        return sorted(loaders) or [SessionId(0)]

    def ask(
        self,
        session: SessionId,
        family: Family,
        specs: Sequence[TensorSpec],
        version: int | None,
        now: float,
        device: int = -1,
    ) -> Answer:
        """What of `specs` is there, on that device or (-1) in host memory, and what the asker is to load.

        Raises: BadArgument when a spec is malformed, is of another family, comes twice, or contradicts the sealed
        tensor of its name; or when the version is older than the current one and not complete any more.
        """
        chosen = self.current(family) if version is None else version
        keys = [self._key(spec, family, chosen, device) for spec in specs]
        if len(set(keys)) != len(keys):
            raise BadArgument(f"{len(keys)} tensors of {family} asked for, some of them twice", "ask for each once")
        absent = [n for n, key in enumerate(keys) if key not in self._sealed and key not in self._loading]
        if absent and chosen < self.current(family):
            raise UnknownName(
                f"{specs[absent[0]].name.path} of {family} version {chosen} is gone",
                f"version {self.current(family)} is current",
            )
        for spec, key in zip(specs, keys, strict=True):
            entry = self._sealed.get(key)
            if entry and entry.spec.shape != spec.shape:
                raise BadArgument(
                    f"{spec.name.path} has shape {entry.spec.shape}, asked for as {spec.shape}",
                    "what changes the shape belongs in the name",
                )
        ready = [self._sealed[key] for key in keys if key in self._sealed]
        for segment in {entry.segment for entry in ready}:
            self._hold(session, SegmentId(segment))
        lacking = [(specs[n], keys[n]) for n in absent]
        grant = self._grant(session, family, chosen, device, lacking) if absent else None
        return Answer(chosen, ready, grant, len(keys) - len(ready) - len(absent))

    def seal(self, session: SessionId, token: int, digests: Sequence[bytes], now: float) -> list[ManifestEntry]:
        """The grant's tensors are loaded; the loader holds their segment.

        Raises: BadToken when the grant is not this session's, BadArgument when the digests are not one per tensor.
        """
        grant = self.grant_of(session, token)
        if len(digests) != len(grant.specs) or any(len(digest) != 16 for digest in digests):
            raise BadArgument(f"{len(digests)} digests for {len(grant.specs)} tensors", "give one of 16 bytes for each")
        del self._grants[token]
        keys, entries = [], []
        for spec, offset, digest in zip(grant.specs, grant.offsets, digests, strict=True):
            key = (spec.name.key_on(grant.device), grant.version)
            del self._loading[key]
            entry = ManifestEntry(spec, grant.version, grant.segment, offset, digest, grant.device)
            self._sealed[key] = entry
            self._members.setdefault((grant.family, grant.version), {})[key[0]] = None
            keys.append(key)
            entries.append(entry)
        self._segments[grant.segment] = Segment(grant.segment, grant.nbytes, grant.device, tuple(keys))
        self._hold(session, grant.segment)
        return entries

    def grant_of(self, session: SessionId, token: int) -> Grant:
        """Raises: BadToken when the grant is unknown or another session's."""
        grant = self._grants.get(token)
        if grant is None or grant.session != session:
            raise BadToken(f"grant {token} is not one of this session's", "ask again")
        return grant

    def give_up(self, session: SessionId, token: int) -> SegmentId:
        """The loader could not: the tensors are absent again. Returns the segment, which is gone. Raises: BadToken."""
        return self._drop_grant(self.grant_of(session, token))

    def release(self, session: SessionId, segment: SegmentId, now: float) -> None:
        """One hold less. Raises: BadToken when the session has none."""
        held = self._segments.get(segment)
        if held is None or not held.holders[session]:
            raise BadToken(f"segment {segment} is not held by this session", "release once for each get")
        self._unhold(held, session, 1, now)

    def closed(self, session: SessionId, now: float) -> Iterator[SegmentId | None]:
        """Give back everything of a session; yields after each step, the segment when one is gone with its grant."""
        for grant in [grant for grant in self._grants.values() if grant.session == session]:
            yield self._drop_grant(grant)
        for segment in [segment for segment in self._segments.values() if segment.holders[session]]:
            self._unhold(segment, session, segment.holders[session], now)
            yield None

    def switch(self, family: Family, version: int) -> int:
        """Make a version current in one step; returns the one it replaces.

        Raises: SwitchRefused when it is not newer, lacks tensors that the current one has, or is still being loaded.
        """
        old = self.current(family)
        if version <= old:
            raise SwitchRefused(f"{family} is at version {old} already", "versions only go up")
        new = self._members.get((family, version), {})
        lacking = [key for key in self._members.get((family, old), {}) if key not in new]
        if lacking or not new:
            names = ", ".join(self._sealed[key, old].spec.name.path for key in lacking[:5]) or "all tensors"
            raise SwitchRefused(f"version {version} of {family} lacks {names}", "load them before the switch")
        if any(grant.family == family and grant.version == version for grant in self._grants.values()):
            raise SwitchRefused(
                f"version {version} of {family} is being loaded", "switch when the loader has sealed it"
            )
        self._current[family] = version
        return old

    def expire(self, now: float) -> list[SegmentId]:
        """Forget the segments that nobody has held for `linger_s`, and those of versions before the current one at
        once; returns them."""
        gone = [id for id, since in self._idle.items() if since + self.linger_s <= now or self._superseded(id)]
        for id in gone:
            del self._idle[id]
            for key in self._segments.pop(id).keys:
                entry = self._sealed.pop(key)
                place = (entry.spec.name.family, entry.version)
                del self._members[place][key[0]]
                if not self._members[place]:
                    del self._members[place]
        return gone

    def next_expiry(self) -> float | None:
        """When `expire` has something to do, None: never as things stand."""
        if any(self._superseded(id) for id in self._idle):
            return 0.0
        return next((since + self.linger_s for since in self._idle.values()), None)

    def manifest(self, family: Family, version: int | None) -> list[ManifestEntry]:
        """All sealed tensors of a version, in the order of their sealing."""
        chosen = self.current(family) if version is None else version
        return [self._sealed[key, chosen] for key in self._members.get((family, chosen), {})]

    def holds(self, session: SessionId, segment: SegmentId) -> bool:
        """Whether the session was told of the segment and has not released it."""
        found = self._segments.get(segment)
        return found is not None and found.holders[session] > 0

    def stats(self) -> dict[str, int | float]:
        return {
            "weight_tensors": len(self._sealed),
            "weight_loading": len(self._loading),
            "weight_segments": len(self._segments),
            "weight_segments_idle": len(self._idle),
            "weight_bytes": sum(segment.nbytes for segment in self._segments.values()),
            "weight_device_bytes": sum(segment.nbytes for segment in self._segments.values() if segment.device >= 0),
        }

    def held_by(self, session: SessionId) -> tuple[int, int]:
        """Segments that a session holds or loads, and their bytes."""
        held = [segment.nbytes for segment in self._segments.values() if segment.holders[session]]
        held += [grant.nbytes for grant in self._grants.values() if grant.session == session]
        return len(held), sum(held)

    def overview(self) -> list[dict[str, Any]]:
        """What there is of each version of a family on each device, for people: tensors and bytes, sealed and being
        loaded, and how many sessions hold some; segments that nobody holds are `idle`."""
        rows: dict[tuple[Family, int, int], dict[str, Any]] = {}
        holders: dict[tuple[Family, int, int], set[SessionId]] = {}

        def row(family: Family, version: int, device: int) -> dict[str, Any]:
            fresh = {"tensors": 0, "bytes": 0, "loading": 0, "segments": 0, "idle": 0, "held_by": 0}
            name = {"model": family.model[:SHOWN_TEXT], "revision": family.revision[:SHOWN_TEXT]}
            which = {"version": version, "device": device, "current": version == self.current(family)}
            return rows.setdefault((family, version, device), name | which | fresh)

        for segment in self._segments.values():
            entry = self._sealed[segment.keys[0]]
            at = entry.spec.name.family, entry.version, segment.device
            found = row(*at)
            found["tensors"] += len(segment.keys)
            found["bytes"] += segment.nbytes
            found["segments"] += 1
            found["idle"] += segment.id in self._idle
            holders.setdefault(at, set()).update(segment.holders)
            found["held_by"] = len(holders[at])
        for grant in self._grants.values():
            row(grant.family, grant.version, grant.device)["loading"] += len(grant.specs)
        return list(rows.values())

    def check(self) -> list[str]:
        """Violated invariants, empty when sound."""
        wrong = []
        for key, token in self._loading.items():
            if token not in self._grants:
                wrong.append(f"weight {key[0].hex()[:12]} is being loaded under no grant")
        for key, entry in self._sealed.items():
            if SegmentId(entry.segment) not in self._segments:
                wrong.append(f"weight {entry.spec.name.path} lies in no segment")
            if key in self._loading:
                wrong.append(f"weight {entry.spec.name.path} is sealed and being loaded")
        for segment in self._segments.values():
            if bool(segment.holders.total()) == (segment.id in self._idle):
                wrong.append(f"weight segment {segment.id} is held and idle, or neither")
        return wrong

    def _key(self, spec: TensorSpec, family: Family, version: int, device: int) -> Versioned:
        spec.check()
        if spec.name.family != family:
            raise BadArgument(f"{spec.name.path} is of {spec.name.family}, asked for with {family}")
        return spec.name.key_on(device), version

    def _grant(
        self,
        session: SessionId,
        family: Family,
        version: int,
        device: int,
        absent: list[tuple[TensorSpec, Versioned]],
    ) -> Grant:
        offsets, end = [], 0
        for spec, _ in absent:
            offsets.append(end)
            end += aligned(spec.nbytes)
        token, segment = self._next_token, SegmentId(self._next_segment)
        self._next_token += 1
        self._next_segment += 1
        specs = tuple(spec for spec, _ in absent)
        grant = Grant(token, session, segment, family, version, specs, tuple(offsets), max(end, 1), device)
        self._grants[token] = grant
        for _, key in absent:
            self._loading[key] = token
        return grant

    def _drop_grant(self, grant: Grant) -> SegmentId:
        del self._grants[grant.token]
        for spec in grant.specs:
            del self._loading[spec.name.key_on(grant.device), grant.version]
        return grant.segment

    def _hold(self, session: SessionId, segment: SegmentId) -> None:
        self._segments[segment].holders[session] += 1
        self._idle.pop(segment, None)

    def _unhold(self, segment: Segment, session: SessionId, count: int, now: float) -> None:
        segment.holders[session] -= count
        if not segment.holders[session]:
            del segment.holders[session]
        if not segment.holders:
            self._idle[segment.id] = now

    def _superseded(self, segment: SegmentId) -> bool:
        key = self._segments[segment].keys[0]
        entry = self._sealed[key]
        return entry.version < self.current(entry.spec.name.family)
