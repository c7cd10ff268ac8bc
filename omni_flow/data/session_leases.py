"""Which pages of a pool are kept for sessions between their turns, and until when. Pure: time is passed in.

A *lease* is what one session has of one chain of pages (the root of a namespace names it): the pages of its last turn.
While it is *kept* its pages go last; at the end of its time they are let go, and the lease only still says whose they
are. When the session ends, the pages that no other session has can be dropped. Its *holders* are the connections that
renewed it: without any of them it is forgotten.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from omni_flow.data.identity import DIGEST_BYTES

Key = bytes
"""Of a page, 32 bytes."""
Name = tuple[str, bytes]
"""Of a lease: its session and its chain."""
NEVER: Final = float("inf")


def lease_name(session: str, tenant: str = "") -> str:
    """What the session of a tenant is called here: names of callers, and their salts, are nobody else's to see."""
    return sha256(b"%d %b %b" % (len(tenant.encode()), tenant.encode(), session.encode())).hexdigest()


def split(raw: bytes) -> list[Key]:
    """The keys that lie behind each other in `raw`."""
    return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]


@dataclass(slots=True)
class Lease:
    """What a session has of one chain.

    Args:
        keys: of its pages, in order.
        tokens: tokens a page.
        until: end of its time; 0 when it is not kept (any more).
        kept: how many of the first pages are kept.
        over: the session has ended; the lease stays until all its holders have said so.
    """

    keys: list[Key]
    tokens: int
    until: float = 0.0
    kept: int = 0
    over: bool = False
    holders: set[int] = field(default_factory=set)


class Change(NamedTuple):
    """What becomes of pages: `keep` them, `let_go` (as any page from now on), `drop` (nobody needs them)."""

    keep: Sequence[Key] = ()
    let_go: Sequence[Key] = ()
    drop: Sequence[Key] = ()


class SessionLeases:
    """The leases of one pool.

    Args:
        most: pages that all sessions together may keep; beyond it those renewed longest ago are let go early.
        known: pages that all leases together may name, and how many leases there may be; beyond it those renewed
            longest ago are forgotten.
    """

    def __init__(self, most: int, known: int) -> None:
        self.most = most
        self._known = known
        self._leases: OrderedDict[Name, Lease] = OrderedDict()
        self._chains: defaultdict[str, set[bytes]] = defaultdict(set)
        self._held: defaultdict[int, set[Name]] = defaultdict(set)
        self._ends: list[tuple[float, Name]] = []
        self._named: Counter[Key] = Counter()
        self._kept: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def kept(self) -> int:
        """Pages that are kept now."""
        return len(self._kept)

    @property
    def due(self) -> float:
        """Before that there is nothing to expire."""
        return self._ends[0][0] if self._ends else NEVER

    def keeps(self, key: Key) -> bool:
        """Whether a page is kept now."""
        return key in self._kept

    def of(self, session: str) -> Iterator[Lease]:
        """The leases of a session."""
        return (self._leases[session, chain] for chain in self._chains.get(session, ()))

    def held_by(self, holder: int) -> tuple[int, int]:
        """How many leases a connection has renewed, and how many pages they keep."""
        names = self._held.get(holder, ())
        return len(names), sum(self._leases[name].kept for name in names)

    def renew(
        self, holder: int, session: str, chain: bytes, keys: list[Key], tokens: int, now: float, ttl: float
    ) -> Change:
        """A turn of a session ended with these pages; pages of its last turn that are not among them are let go."""
        name = (session, chain)
        lease = self._leases.get(name)
        if lease is None:
            lease = self._leases[name] = Lease([], tokens)
            self._chains[session].add(chain)
        self._leases.move_to_end(name)
        same = next((at for at, (old, new) in enumerate(zip(lease.keys, keys, strict=False)) if old != new), None)
        same = min(len(lease.keys), len(keys)) if same is None else same
        gone = self._unkeep(lease, same)
        self._unname(lease.keys[same:])
        self._named.update(keys[same:])
        lease.keys, lease.tokens, lease.over = keys, tokens, False
        lease.holders.add(holder)
        self._held[holder].add(name)
        self._keep(lease, min(len(keys), self.most))
        lease.until = now + ttl
        self._ends_at(lease.until, name)
        gone += self._make_room(lease)
        return Change(keys[: lease.kept], [key for key in gone if key not in self._kept])

    def expire(self, now: float) -> list[Key]:
        """Let go of what was not renewed in time; the leases stay known."""
        gone: list[Key] = []
        while self.due <= now:
            until, name = heapq.heappop(self._ends)
            lease = self._leases.get(name)
            if lease is not None and lease.until == until:  # else renewed since
                gone += self._unkeep(lease, 0)
        return gone

    def _ends_at(self, until: float, name: Name) -> None:
        heapq.heappush(self._ends, (until, name))
        if len(self._ends) > 2 * len(self._leases) + 64:
            self._ends = [(lease.until, name) for name, lease in self._leases.items() if lease.until]
            heapq.heapify(self._ends)

    def end(self, holder: int, session: str) -> Change:
        """The session is over, as far as this holder knows."""
        gone: list[Key] = []
        drop: list[Key] = []
        for name in [(session, chain) for chain in self._chains.get(session, ())]:
            lease = self._leases[name]
            lease.over = True
            self._unhold(name, holder)
            gone += self._unkeep(lease, 0)
            drop += [key for key in lease.keys if self._named[key] == 1]
            if not lease.holders:
                self._forget(name)
        return Change((), gone, drop)

    def leave(self, holder: int) -> Change:
        """A connection has ended, and with it what it alone had renewed."""
        gone: list[Key] = []
        drop: list[Key] = []
        for name in self._held.pop(holder, ()):
            lease = self._leases[name]
            lease.holders.discard(holder)
            if lease.over:
                drop += [key for key in lease.keys if self._named[key] == 1]
            if not lease.holders:
                gone += self._unkeep(lease, 0)
                self._forget(name)
        return Change((), gone, drop)

    def check(self) -> list[str]:
        """Violated invariants; empty when sound."""
        named = Counter(key for lease in self._leases.values() for key in lease.keys)
        kept = Counter(key for lease in self._leases.values() for key in lease.keys[: lease.kept])
        faults = []
        if named != self._named or kept != self._kept:
            faults.append(f"session leases name {len(named)} pages and keep {len(kept)}, counted otherwise")
        chains = {(session, chain) for session, those in self._chains.items() for chain in those}
        held = {(holder, name) for holder, names in self._held.items() for name in names}
        if chains != self._leases.keys() or held != {
            (h, n) for n, lease in self._leases.items() for h in lease.holders
        }:
            faults.append("session leases are not found by their sessions or holders")
        if len(kept) > self.most:
            faults.append(f"sessions keep {len(kept)} pages of at most {self.most}")
        if any((lease.until > 0) != (lease.kept > 0) for lease in self._leases.values() if lease.keys):
            faults.append("a session lease is kept without an end, or has an end without being kept")
        return faults

    def _keep(self, lease: Lease, pages: int) -> None:
        self._kept.update(lease.keys[lease.kept : pages])
        lease.kept = max(lease.kept, pages)

    def _unkeep(self, lease: Lease, pages: int) -> list[Key]:
        """Keep only the first `pages` of a lease; returns those that nobody keeps now."""
        gone = _less(self._kept, lease.keys[pages : lease.kept])
        lease.kept = min(lease.kept, pages)
        if not lease.kept:
            lease.until = 0.0
        return gone

    def _unname(self, keys: Iterable[Key]) -> None:
        _less(self._named, keys)

    def _unhold(self, name: Name, holder: int) -> None:
        self._leases[name].holders.discard(holder)
        names = self._held.get(holder, set())
        names.discard(name)
        if not names:
            self._held.pop(holder, None)

    def _forget(self, name: Name) -> None:
        for holder in list(self._leases[name].holders):
            self._unhold(name, holder)
        self._unname(self._leases.pop(name).keys)
        session, chain = name
        self._chains[session].discard(chain)
        if not self._chains[session]:
            del self._chains[session]

    def _make_room(self, renewed: Lease) -> list[Key]:
        gone: list[Key] = []
        for lease in self._leases.values():
            if len(self._kept) <= self.most:
                break
            if lease is not renewed:
                gone += self._unkeep(lease, 0)
        while max(len(self._named), len(self._leases)) > self._known and len(self._leases) > 1:
            name = next(iter(self._leases))
            gone += self._unkeep(self._leases[name], 0)
            self._forget(name)
        return gone


def _less(counts: Counter[Key], keys: Iterable[Key]) -> list[Key]:
    """Count each key once less; returns those that are at zero now."""
    gone = []
    for key in keys:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
            gone.append(key)
    return gone
