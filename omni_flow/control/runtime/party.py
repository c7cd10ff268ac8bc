"""A request on a replica: the shell around its shares. Sends what they say, and says it again after a death."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from omni_flow.control.activations import Activations
from omni_flow.control.facts import Message
from omni_flow.control.host import Activation
from omni_flow.control.ledger import Ledger
from omni_flow.control.plan import Interface, InterfaceId, Path
from omni_flow.control.runtime.closed import ClosedRequests
from omni_flow.control.runtime.tensors import Spilled
from omni_flow.control.runtime.wire import LOST, Head
from omni_flow.control.share import Share
from omni_flow.refs import TensorRef

if TYPE_CHECKING:
    from omni_flow.control.runtime.node import Node
    from omni_flow.control.runtime.replica import Replica

SHARE_BITS = 16
SHARE_MASK = (1 << SHARE_BITS) - 1
TO_GATEWAY = -1
KEPT_REFS = 65_536
"""How many of the last placed arrays a party remembers, to settle them when its request is over."""


class Outbox:
    """What one party of a request has to send this tick, by share; and what it may have to say again.

    `head` travels in each envelope, `book` knows the gateway's oldest live request. Where the shares are hosted was
    pinned at admission (`info.replicas`).
    """

    def __init__(self, node: Node, head: bytes, info: Head, book: ClosedRequests) -> None:
        self.node = node
        self.book = book
        self.head = head
        self.info = info
        self.counts = [len(hosts) for hosts in info.replicas]
        self.out: dict[int, list[Message]] = {}
        self.over = False
        self._hosts: dict[int, str | None] = {}
        self._addresses: dict[int, str | None] = {}
        self._touched: set[int] = set()
        self._keeps = node.keeps
        self._ledger = Ledger(node.plan) if node.keeps_any else None
        self._lost: set[int] | None = None
        self.spilled: deque[TensorRef] | None = None

    def send(self, role: int, share: int, message: Message, interfaces: tuple[InterfaceId, ...]) -> None:
        """Queue a message for a share of `role`."""
        key = (role << SHARE_BITS) | share
        out = self.out.get(key)
        if out is None:
            out = self._open(key)
        out.append(message)
        if type(message.value) is Spilled:
            message.value.consumers += 1
        elif self._keeps[role]:
            assert self._ledger is not None
            self._ledger.sent(role, share, message, interfaces)

    def to_gateway(self, message: Message) -> None:
        """Queue a message for the request's gateway."""
        out = self.out.get(TO_GATEWAY)
        if out is None:
            out = self._open(TO_GATEWAY)
        out.append(message)
        if type(message.value) is Spilled:
            message.value.consumers += 1

    def _open(self, key: int) -> list[Message]:
        if not self.out:
            self.node.dirty.append(self)
        out = self.out[key] = []
        if key >= 0:
            self._touched.add(key)
        return out

    def note(self, payload: Any) -> None:
        """A payload of this party: what it placed in the data plane is settled when the request is over."""
        if type(payload) is Spilled:
            if self.spilled is None:
                self.spilled = deque(maxlen=KEPT_REFS)
            self.spilled += payload.refs

    def address(self, key: int) -> str | None:
        """Where the replica that hosts a share listens; None if none lives (yet)."""
        address = self._addresses.get(key)
        if address is None:
            host = self.host(key)
            address = self._addresses[key] = None if host is None else self.node.roster.address(host)
        return address

    def host(self, key: int) -> str | None:
        """The replica id that hosts a share now; None if none lives (yet)."""
        host = self._hosts.get(key)
        if host is None:
            host = self._hosts[key] = self._find(key >> SHARE_BITS, key & SHARE_MASK)
        return host

    def _find(self, role: int, share: int) -> str | None:
        return self.node.roster.host(self.info.replicas[role], share, self._keeps[role])

    def roster_changed(self) -> None:
        """Replicas died or came: say again what their shares need, or say that the request lost them."""
        self._addresses.clear()
        for key in list(self._touched):
            role, share = key >> SHARE_BITS, key & SHARE_MASK
            before = self._hosts.get(key)
            now = self._find(role, share)
            if now == before and now is not None:
                continue
            if before is not None:
                self._replay(key, role, share, before)
            elif now is not None and key in self._hosts:
                self._resend(key, role, share)
            if now is None and self.node.roster.given_up(self.info.replicas[role], share):
                replica = self.info.replicas[role][share]
                cause = self.node.roster.cause(replica)
                self.lose(role, share, f"replica {replica} died: {cause}; none comes after it")
            self._hosts[key] = now

    def _replay(self, key: int, role: int, share: int, dead: str) -> None:
        again = self._ledger.died(role, share) if self._ledger is not None and self._keeps[role] else None
        if again is None:
            self.lose(role, share, f"replica {dead} died: {self.node.roster.cause(dead)}")
            return
        self.out[key] = [message for message, _ in again]
        if self not in self.node.dirty:
            self.node.dirty.append(self)

    def _resend(self, key: int, role: int, share: int) -> None:
        assert self._ledger is not None
        self.out[key] = [message for message, _ in self._ledger.all(role, share)]
        if self not in self.node.dirty:
            self.node.dirty.append(self)

    def lose(self, role: int, share: int, cause: str) -> None:
        """Tell the gateway, once, that a share this party sent to is lost."""
        key = (role << SHARE_BITS) | share
        if self._lost is None:
            self._lost = set()
        if key not in self._lost:
            self._lost.add(key)
            self.to_gateway(Message(LOST, role, (), share, cause))


class Party(Outbox):
    """A request on a replica: its shares (mostly one; more when shares of the dead are hosted here too)."""

    def __init__(self, replica: Replica, head: bytes, info: Head, book: ClosedRequests) -> None:
        super().__init__(replica.node, head, info, book)
        self.replica = replica
        self.shares: dict[int, Share] = {}
        self.decode = self.node.values.decode  # no method of this object: what keeps it must not keep the party
        self.deadline = None if info.deadline_s is None else time.monotonic() + info.deadline_s

    def share(self, index: int) -> Share:
        """The share, made empty when its first message comes."""
        share = self.shares.get(index)
        if share is None:
            node = self.node
            share = self.shares[index] = Share(
                node.plan, self.replica.role, index, self.counts, self.info.params, self, node.credit, node.credit_bytes
            )
        return share

    def start(self, share: Activations, activation: Activation) -> None:
        self.replica.execution.start(self, share, activation)

    def resume(self, share: Activations, activation: Activation) -> None:
        self.replica.execution.resume(activation)

    def report(self, share: Activations, interface: Interface, path: Path, error: Exception) -> None:
        place = self.node.plan.show(interface.scope[:-1], path)
        self.node.log.error(
            "%s[%s]: its window policy raised; the windows end torn", interface.name, place, exc_info=error
        )
