"""Which pages of a pool are kept for sessions between their turns, and until when. Pure: time is passed in.

A *lease* is what one session has of one chain of pages (the root of a namespace names it): the pages of its last turn.
While it is *kept* its pages go last; at the end of its time they are let go, and the lease only still says whose they
are. When the session ends, the pages that no other session has can be dropped. Its *holders* are the connections that
renewed it: without any of them it is forgotten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from omni_flow.data.identity import DIGEST_BYTES

Key = bytes
"""Of a page, 32 bytes."""
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

    `due`: before that there is nothing to expire.
    """

    def __init__(self, most: int, known: int) -> None:
        self.most = most
        self.due = NEVER
        self._known = known
        self._leases: OrderedDict[tuple[str, bytes], Lease] = OrderedDict()
        self._named: Counter[Key] = Counter()
        self._kept: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def kept(self) -> int:
        """Pages that are kept now."""
        return len(self._kept)

    def of(self, session: str) -> Iterator[Lease]:
        """The leases of a session."""
        return (lease for (name, _), lease in self._leases.items() if name == session)

    def renew(
        self, holder: int, session: str, chain: bytes, keys: list[Key], tokens: int, now: float, ttl: float
    ) -> Change:
        """A turn of a session ended with these pages; pages of its last turn that are not among them are let go."""
        lease = self._leases.get((session, chain))
        if lease is None:
            lease = self._leases[session, chain] = Lease([], tokens)
        self._leases.move_to_end((session, chain))
        same = next((at for at, (old, new) in enumerate(zip(lease.keys, keys, strict=False)) if old != new), None)
        same = min(len(lease.keys), len(keys)) if same is None else same
        gone = self._unkeep(lease, same)
        self._unname(lease.keys[same:])
        self._named.update(keys[same:])
        lease.keys, lease.tokens, lease.over = keys, tokens, False
        lease.holders.add(holder)
        self._keep(lease, min(len(keys), self.most))
        lease.until = now + ttl
        self.due = min(self.due, lease.until)
        gone += self._make_room(lease)
        return Change(keys[: lease.kept], [key for key in gone if key not in self._kept])

    def expire(self, now: float) -> list[Key]:
        """Let go of what was not renewed in time; the leases stay known."""
        if now < self.due:
            return []
        gone: list[Key] = []
        for lease in self._leases.values():
            if lease.until and lease.until <= now:
                gone += self._unkeep(lease, 0)
        self.due = min((lease.until for lease in self._leases.values() if lease.until), default=NEVER)
        return gone

    def end(self, holder: int, session: str) -> Change:
        """The session is over, as far as this holder knows."""
        gone: list[Key] = []
        drop: list[Key] = []
        for name in [name for name in self._leases if name[0] == session]:
            lease = self._leases[name]
            lease.over = True
            lease.holders.discard(holder)
            gone += self._unkeep(lease, 0)
            drop += [key for key in lease.keys if self._named[key] == 1]
            if not lease.holders:
                self._forget(name)
        return Change((), gone, drop)

    def leave(self, holder: int) -> Change:
        """A connection has ended, and with it what it alone had renewed."""
        gone: list[Key] = []
        drop: list[Key] = []
        for name, lease in [(name, lease) for name, lease in self._leases.items() if holder in lease.holders]:
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

    def _forget(self, name: tuple[str, bytes]) -> None:
        self._unname(self._leases.pop(name).keys)

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
