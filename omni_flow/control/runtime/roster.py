"""Who lives: a node's copy of the registry's view, and which replica hosts a share. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from omni_flow.control.ledger import host_of
from omni_flow.control.runtime.wire import Record, Roster


class Members:
    """The last roster heard. `apply` takes a newer one; older ones are ignored."""

    def __init__(self) -> None:
        self.version = -1
        self.live: dict[str, Record] = {}
        self.dead: dict[str, str] = {}
        self.successors: dict[str, str] = {}
        self.leaving: frozenset[str] = frozenset()
        self.gateways_gone: frozenset[str] = frozenset()

    def apply(self, roster: Roster) -> bool:
        """Take a roster. False if it is not newer than what is known."""
        if roster.version <= self.version:
            return False
        self.version = roster.version
        self.live = {record.id: record for record in roster.live}
        self.dead = roster.dead
        self.successors = roster.successors
        self.leaving = frozenset(roster.leaving)
        self.gateways_gone = frozenset(roster.gateways_gone)
        return True

    def host(self, replicas: Sequence[str], share: int, moves: bool) -> str | None:
        """The replica that hosts `share` of a role whose pinned list is `replicas`; None while there is none.

        `moves`: the role has interfaces that declare `retries`, so its shares may be hosted anew.
        """
        if replicas[share] not in self.dead:
            return replicas[share]
        if not moves:
            return None
        return host_of(replicas, share, self.dead, self.successors)

    def given_up(self, replicas: Sequence[str], share: int) -> bool:
        """Whether no replica will ever host a share that has none now: the registry says so by naming the last
        incarnation of its place its own successor.
        """
        replica = replicas[share]
        while (successor := self.successors.get(replica)) is not None:
            if successor == replica:
                return True
            replica = successor
        return False

    def address(self, replica: str) -> str | None:
        """Where a live replica listens."""
        record = self.live.get(replica)
        return None if record is None else record.address

    def cause(self, replica: str) -> str:
        """Why a replica is dead, as the registry said."""
        return self.dead.get(replica, "it left")

    def of_role(self, role: str) -> list[Record]:
        """Replicas that take new requests of a role, by id."""
        return sorted(
            (r for r in self.live.values() if r.role == role and r.id not in self.leaving), key=lambda r: r.id
        )
