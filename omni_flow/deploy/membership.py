"""The registry on a node: hears what replicas say, tells everybody who lives."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from omni_flow.control.runtime.node import Node
from omni_flow.control.runtime.wire import Ailing, Register, Retired, Seen, Subscribe, Suspect
from omni_flow.deploy.registry import Registry

log = logging.getLogger("omni_flow.registry")

JOIN_S = 2.0
"""How long a newcomer is kept from requests because somebody has not said that he knows it."""


class Members(Protocol):
    """Whoever keeps the replicas' processes."""

    def joined(self, id: str, pid: int, load_s: float) -> None:
        """A replica takes requests from now on."""

    def retired(self, id: str) -> None:
        """A replica is empty and ends."""

    def ailing(self, id: str, cause: str) -> None:
        """A replica can't serve for now; with no cause, it can again."""

    def suspected(self, id: str, cause: str) -> None:
        """Somebody can't reach a live replica."""


class Membership:
    """Answers packets of membership on the launcher's node. `on_control` goes to the node."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._loads: dict[str, float] = {}

    def start(self, node: Node) -> None:
        """Begin, once the node listens."""
        self.node = node
        self.registry = Registry(node.address)
        node.registry = node.address

    def on_control(self, sender: str, packet: Any) -> None:
        """A packet of membership from `sender`."""
        registry = self.registry
        if isinstance(packet, Register):
            record = packet.record
            if registry.register(record):
                self._loads[record.id] = packet.load_s
                self._tell([])
                self.node.loop.call_later(JOIN_S, self._stop_waiting, record.id)
        elif isinstance(packet, Seen):
            self._changed(registry.seen(packet.address, packet.version))
        elif isinstance(packet, Suspect):
            self._suspect(packet)
        elif isinstance(packet, Retired):
            joined = registry.left(packet.id)
            if joined is not None:
                self._members.retired(packet.id)
                self._tell(joined)
        elif isinstance(packet, Ailing):
            self._members.ailing(packet.id, packet.cause)
        elif isinstance(packet, Subscribe):
            if registry.subscribe(packet.gateway, packet.address):
                self._tell([])
        else:
            log.warning("%s sent a %s, which is not for a registry", sender, type(packet).__name__)

    def _suspect(self, suspect: Suspect) -> None:
        record = self.registry.at(suspect.address)
        if record is not None:
            self._members.suspected(record.id, suspect.cause)
        elif self.registry.gateway_gone(suspect.address):
            log.warning("a gateway at %s is gone: %s", suspect.address, suspect.cause)
            self._tell([])

    def _stop_waiting(self, id: str) -> None:
        self._changed(self.registry.stop_waiting(id))

    def _changed(self, joined: list[str]) -> None:
        if joined:
            self._tell(joined)

    def _tell(self, joined: list[str]) -> None:
        """Apply the present roster here and send it to everybody; then tell of `joined`."""
        roster = self.registry.roster()
        self.node.apply(roster)
        for address in self.registry.addresses():
            self.node.post(address, roster)
        self.node.flush()
        for id in joined:
            record = self.registry.live.get(id)
            if record is not None:
                self._members.joined(id, record.pid, self._loads.pop(id, 0.0))

    # ---- from the supervisor --------------------------------------------------------------------------------

    def died(self, id: str, cause: str) -> None:
        """A replica's process has ended."""
        self._loads.pop(id, None)
        joined = self.registry.died(id, cause)
        if joined is not None:
            self._tell(joined)

    def give_up(self, place: str) -> None:
        """No replica will come to a place any more."""
        if self.registry.give_up(place):
            self._tell([])

    def leave(self, ids: list[str]) -> None:
        """Replicas take no new requests from now on."""
        left = [id for id in ids if self.registry.leave(id)]
        if left:
            self._tell([])

    def address(self, id: str) -> str | None:
        """Where a live replica listens."""
        record = self.registry.live.get(id)
        return None if record is None else record.address
