"""What a session holds of a pool, and the shares that bound it. Pure.

A *share* bounds how many slots of a tier may be unavailable to others because of its members: reserved ones, distinct
pinned ones, and those in quarantine. An engine with a quota has a share of its own, movers have the staging share,
everyone else shares the rest. As the limits of all shares add up to the tier at most, and a slot that no share holds
can be evicted, a reservation within its share never fails for want of room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.errors import BadArgument, Holder
from omni_flow.data.messages import L1, L2

U32 = NDArray[np.uint32]


class Share:
    """A bound on held slots of one tier."""

    def __init__(self, name: str, limit: int, slots: int) -> None:
        self.name = name
        self.limit = limit
        self.reserved = 0
        self.pinned = 0
        self.quarantined = 0
        self.counts = np.zeros(slots, np.uint32)

    @property
    def used(self) -> int:
        return self.reserved + self.pinned + self.quarantined

    @property
    def room(self) -> int:
        return self.limit - self.used

    def pin(self, slots: U32) -> None:
        """One more pin of this share on each of distinct slots."""
        now = self.counts[slots]
        self.pinned += int((now == 0).sum())
        self.counts[slots] = now + np.uint32(1)

    def unpin(self, slots: U32, times: NDArray[np.uint32] | int = 1) -> None:
        now = self.counts[slots] - np.asarray(times, np.uint32)
        self.pinned -= int((now == 0).sum())
        self.counts[slots] = now


@dataclass(slots=True, eq=False)
class Account:
    """One session in one pool."""

    session: int
    pid: int
    name: str
    share1: Share
    share2: Share
    reserved: dict[int, int] = field(default_factory=lambda: {L1: 0, L2: 0})
    pinned: int = 0
    tokens: dict[int, Reservation] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)

    def share(self, tier: int) -> Share:
        return self.share1 if tier == L1 else self.share2

    def holder(self) -> Holder:
        return Holder(self.session, self.pid, self.name, sum(self.reserved.values()), self.pinned)


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots of one tier, invisible to everyone else; `live` says which positions are still reserved, `forced` that
    cached pages were dropped for them which nobody had written down in time."""

    token: int
    tier: int
    slots: U32
    live: NDArray[np.bool_]
    left: int
    forced: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """Pins on slots; per position the tier (0: not pinned by this position) and the slot."""

    id: int
    tiers: NDArray[np.uint8]
    slots: U32
    left: int


def live_positions(positions: U32 | None, live: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Checked positions of a reservation or lease; None: all that are left."""
    if positions is None:
        return np.flatnonzero(live)
    at = positions.astype(np.int64)
    if len(at) and (int(at.max()) >= len(live) or not live[at].all()):
        raise BadArgument(f"a position of {len(at)} is outside 0..{len(live) - 1} or already given back")
    if len(at) > 1:
        ordered = np.sort(at)
        if (ordered[1:] == ordered[:-1]).any():
            raise BadArgument("a position comes twice")
    return at
