"""What a party of a request has sent to whom, so that a death can be answered: say it again, or say that it is lost.

Each sender (a share, the gateway) holds one `Ledger` per request. For shares all of whose touched interfaces declare
`retries`, it keeps every message, acks too, until the request closes: the share is hosted anew, empty, and gets all of
it again. For any other share it keeps one bit. Pure.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from omni_flow.control.facts import Message
from omni_flow.control.plan import InterfaceId, Plan

Sent = tuple[Message, tuple[InterfaceId, ...]]


class _Log:
    __slots__ = ("allowed", "deaths", "messages")

    def __init__(self) -> None:
        self.allowed: int | None = None
        self.deaths = 0
        self.messages: list[Sent] = []


class Ledger:
    """What was sent in one request by one party, by (role, share)."""

    __slots__ = ("_logs", "_retries")

    def __init__(self, plan: Plan) -> None:
        self._retries = [i.spec.retries for i in plan.interfaces]
        self._logs: dict[tuple[int, int], _Log] = {}

    def sent(self, role: int, share: int, message: Message, interfaces: tuple[InterfaceId, ...]) -> None:
        """Note a message that was or is about to be sent to `interfaces` of a share."""
        log = self._logs.get((role, share))
        if log is None:
            log = self._logs[role, share] = _Log()
        for interface in interfaces:
            retries = self._retries[interface]
            if log.allowed is None or retries < log.allowed:
                log.allowed = retries
        if log.allowed == 0:
            log.messages.clear()
        else:
            log.messages.append((message, interfaces))

    def died(self, role: int, share: int) -> list[Sent] | None:
        """The replica that hosted a share died: what to send to its next host, in the order first sent.

        None: the share was sent something that can't be said again, or has died more often than its interfaces allow;
        the gateway must be told that the request lost it.
        """
        log = self._logs.get((role, share))
        if log is None:
            return []
        log.deaths += 1
        if log.allowed is not None and log.deaths > log.allowed:
            return None
        return list(log.messages)

    def all(self, role: int, share: int) -> list[Sent]:
        """Everything kept for a share, for a host that was found later."""
        log = self._logs.get((role, share))
        return [] if log is None else list(log.messages)

    def touched(self, role: int, share: int) -> bool:
        """Whether anything was sent to the share."""
        return (role, share) in self._logs


def host_of(
    replicas: Sequence[str], share: int, dead: Container[str], successors: Mapping[str, str] | None = None
) -> str | None:
    """Which replica hosts `share` of a role whose list, pinned at admission, is `replicas`.

    The first that lives, from the share's own place on, around the list. If none of the list lives: the replica that
    was started in place of the share's own (`successors`, dead replica to new one), or None while there is none.
    """
    for step in range(len(replicas)):
        replica = replicas[(share + step) % len(replicas)]
        if replica not in dead:
            return replica
    replica = replicas[share % len(replicas)]
    seen = {replica}
    while successors and replica in successors:
        replica = successors[replica]
        if replica not in dead:
            return replica
        if replica in seen:
            return None
        seen.add(replica)
    return None
