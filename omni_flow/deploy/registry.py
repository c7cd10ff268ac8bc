"""The embedded registry: who lives, who died of what, who came in whose place. Pure: no clock, no socket.

A newcomer takes part in two steps. At `register` everybody is told its address, but it takes no requests yet (it
stands among `leaving` in the roster). Once all who lived then have `seen` that roster, it takes requests, and it
becomes the successor of the incarnation it replaces. So whoever gets a message of a request knows every replica that
the request names, whatever the order of messages on different channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from omni_flow.control.runtime.wire import Record, Roster

KEPT: Final = 1024
"""How many dead ids (and dead gateways) are remembered: far more than die while one request lives."""


def place_of(id: str) -> str:
    """The place of an incarnation: `tts/0` of `tts/0@3`."""
    return id.rpartition("@")[0]


@dataclass(slots=True)
class _Joining:
    """A newcomer: since which version it is told, and who has not seen that yet."""

    version: int
    awaited: set[str] = field(default_factory=set)


class Registry:
    """The whole view of a deployment. Each change makes a new `version`.

    `here` is the address of the node that holds the registry: it is told first and is waited for by nobody.
    """

    def __init__(self, here: str, kept: int = KEPT) -> None:
        self.here = here
        self.version = 0
        self.live: dict[str, Record] = {}
        self.dead: dict[str, str] = {}
        self.successors: dict[str, str] = {}
        self.leaving: set[str] = set()
        self.gateways: dict[str, str] = {}
        self.gateways_gone: dict[str, None] = {}
        self._joining: dict[str, _Joining] = {}
        self._last: dict[str, str] = {}
        self._kept = kept

    # ---- replicas -------------------------------------------------------------------------------------------

    def register(self, record: Record) -> bool:
        """A replica is ready. False if that id is known already, or dead: then nothing changes."""
        if record.id in self.live or record.id in self.dead:
            return False
        self.live[record.id] = record
        self.version += 1
        self._joining[record.id] = _Joining(self.version, set(self.addresses()))
        return True

    def seen(self, address: str, version: int) -> list[str]:
        """`address` knows the roster of `version`. The ids that take requests from now on."""
        joined = []
        for id, joining in self._joining.items():
            if joining.version <= version:
                joining.awaited.discard(address)
            if not joining.awaited:
                joined.append(id)
        return self._join(joined)

    def stop_waiting(self, id: str) -> list[str]:
        """Let a newcomer take requests though somebody has not seen it: that one is as good as dead."""
        return self._join([id] if id in self._joining else [])

    def joining(self, id: str) -> bool:
        """Whether a live replica still waits to be known by all."""
        return id in self._joining

    def _join(self, ids: list[str]) -> list[str]:
        for id in ids:
            del self._joining[id]
            before = self._last.pop(place_of(id), None)
            if before is not None and before in self.dead:
                self.successors[before] = id
        if ids:
            self.version += 1
        return ids

    def died(self, id: str, cause: str) -> list[str] | None:
        """A replica's process has ended. None if it is not among the living; else the newcomers who join by it."""
        record = self.live.pop(id, None)
        if record is None:
            return None
        self.leaving.discard(id)
        if self._joining.pop(id, None) is None:
            self._last[place_of(id)] = id
        self.dead[id] = cause
        self._prune()
        self.version += 1
        return self.seen(record.address, self.version)

    def give_up(self, place: str) -> bool:
        """No replica will come to a place any more: its last incarnation becomes its own successor, and requests that
        wait for another fail. False if none has died there.
        """
        last = self._last.pop(place, None)
        if last is None or last not in self.dead:
            return False
        self.successors[last] = last
        self.version += 1
        return True

    def leave(self, id: str) -> bool:
        """A replica takes no new requests from now on. False if it is not among the living."""
        if id not in self.live or id in self.leaving:
            return False
        self.leaving.add(id)
        self.version += 1
        return True

    def left(self, id: str) -> list[str] | None:
        """A replica is empty and ends: no request names it any more. As `died`, without a dead to remember."""
        record = self.live.pop(id, None)
        if record is None:
            return None
        self.leaving.discard(id)
        self._joining.pop(id, None)
        self.version += 1
        return self.seen(record.address, self.version)

    def at(self, address: str) -> Record | None:
        """The live replica that listens at `address`."""
        return next((record for record in self.live.values() if record.address == address), None)

    # ---- gateways -------------------------------------------------------------------------------------------

    def subscribe(self, gateway: str, address: str) -> bool:
        """A gateway wants to hear of changes. False if it is known already, or gone."""
        if gateway in self.gateways or gateway in self.gateways_gone:
            return False
        self.gateways[gateway] = address
        self.version += 1
        return True

    def gateway_gone(self, address: str) -> bool:
        """Whoever listened at `address` is gone: the requests of its gateways are over. False if there was none."""
        gone = [gateway for gateway, at in self.gateways.items() if at == address]
        for gateway in gone:
            del self.gateways[gateway]
            self.gateways_gone[gateway] = None
        if gone:
            self._prune()
            self.version += 1
            self.seen(address, self.version)
        return bool(gone)

    # ---- the view -------------------------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        """Everybody who is told: replicas and gateways, without the registry's own node."""
        found = {record.address for record in self.live.values()} | set(self.gateways.values())
        found.discard(self.here)
        return sorted(found)

    def roster(self) -> Roster:
        """What everybody is told now."""
        return Roster(
            version=self.version,
            live=list(self.live.values()),
            dead=dict(self.dead),
            successors=dict(self.successors),
            leaving=sorted(self.leaving | self._joining.keys()),
            gateways_gone=list(self.gateways_gone),
        )

    def _prune(self) -> None:
        while len(self.dead) > self._kept:
            oldest = next(iter(self.dead))
            del self.dead[oldest]
            self.successors.pop(oldest, None)
        while len(self.gateways_gone) > self._kept:
            del self.gateways_gone[next(iter(self.gateways_gone))]
