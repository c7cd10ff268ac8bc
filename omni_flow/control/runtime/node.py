"""A node: a process's mouth and ears. Takes batches apart for its replicas and its gateway, and sends once per tick.

One node has one transport and mostly one replica. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from omni_flow.control.credit import UNBOUNDED
from omni_flow.control.plan import Plan
from omni_flow.control.runtime.party import SHARE_BITS, SHARE_MASK, TO_GATEWAY, Outbox
from omni_flow.control.runtime.roster import Members
from omni_flow.control.runtime.tensors import Spilled
from omni_flow.control.runtime.values import Values
from omni_flow.control.runtime.wire import (
    CLOSE,
    GATEWAY_ROLE,
    Census,
    EndSession,
    Envelope,
    Inspect,
    Roster,
    Seen,
    Suspect,
)
from omni_flow.control.transport.base import Transport
from omni_flow.control.transport.errors import MessageTooLarge

if TYPE_CHECKING:
    from omni_flow.control.runtime.gateway import Gateway
    from omni_flow.control.runtime.replica import Replica

SETTLE_S = 0.25
"""How long placed arrays of requests that are over are gathered before the data plane is told of them."""

OnControl = Callable[[str, Any], None]
"""Called with (sender's address, packet of membership)."""


class _Answers:
    """Answers to one inspection."""

    def __init__(self, asked: dict[str, str], all: asyncio.Future[None]) -> None:
        self.held: dict[str, dict[str, int]] = {}
        self.counters: dict[str, dict[str, int]] = {}
        self.all = all
        self._asked = asked

    def take(self, census: Census) -> None:
        id = self._asked.pop(census.address, None)
        if id is not None:  # else it has died since
            self.held[id] = census.held
            self.counters[id] = census.counters
        self._check()

    def only(self, live: Container[str]) -> None:
        """Wait for those of `live` (ids) alone: the others are dead."""
        self._asked = {address: id for address, id in self._asked.items() if id in live}
        self._check()

    def _check(self) -> None:
        if not self._asked and not self.all.done():
            self.all.set_result(None)


class Node:
    """A place on the network of a deployment.

    `on_control` gets packets of membership that a node itself has no use for. `credit` is W in numbers, `credit_bytes`
    in bytes, per parent.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        values: Values,
        *,
        credit: int | None = None,
        credit_bytes: int = UNBOUNDED,
        on_control: OnControl | None = None,
        registry: str | None = None,
    ) -> None:
        self.plan = plan
        self.transport = transport
        self.values = values
        self.credit = plan.credit if credit is None else credit
        self.credit_bytes = credit_bytes
        self.keeps = [any(i.spec.retries > 0 for i in role.members) for role in plan.roles]
        self.keeps_any = any(self.keeps)
        self.roster = Members()
        self.replicas: dict[int, Replica] = {}
        self.gateway: Gateway | None = None
        self.dirty: list[Outbox] = []
        self.log = logging.getLogger("omni_flow.node")
        self.retiring = False
        self.retired: Callable[[], None] = lambda: None
        self.registry = registry
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # set by start(), before any use
        self._on_control = on_control
        self._posts: list[tuple[str, Any]] = []
        self._scheduled = False
        self._flushing = False
        self._tokens = itertools.count()
        self._censuses: dict[int, _Answers] = {}

    async def start(self) -> None:
        """Begin to listen."""
        self.loop = asyncio.get_running_loop()
        await self.transport.start(self._on_batch, self._on_lost)

    @property
    def address(self) -> str:
        """Where others reach this node."""
        return self.transport.address

    async def close(self) -> None:
        """Send what is queued and close the transport."""
        self.values.settle_now()
        self.flush()
        await self.transport.close()

    # ---- receiving ------------------------------------------------------------------------------------------

    def _on_batch(self, sender: str, batch: list[Any]) -> None:
        for item in batch:
            self._take(sender, item)
        if self.dirty or self._posts:
            self.schedule_flush()

    def _take(self, sender: str, item: Any) -> None:
        """One packet. What makes no sense is logged and dropped: a peer must not be able to stop this node."""
        try:
            if type(item) is Envelope:
                self._dispatch(item)
            elif type(item) is Roster:
                self.apply(item)
                if self.registry is not None:
                    self.post(self.registry, Seen(self.address, item.version))
            elif type(item) is EndSession:
                for replica in self.replicas.values():
                    replica.execution.end_session(item.session, item.tenant)
            elif type(item) is Inspect:
                self.post(item.reply_to, Census(self.address, item.token, self.census(), self.counted()))
            elif type(item) is Census:
                self._take_census(item)
            elif self._on_control is not None:
                self._on_control(sender, item)
        except Exception:
            self.log.exception("a message from %s made no sense and was dropped", sender)

    def _dispatch(self, envelope: Envelope) -> None:
        role = envelope.role
        if role >= 0:
            self.replicas[role].receive(envelope)
        elif role == GATEWAY_ROLE:
            if self.gateway is not None:
                self.gateway.receive(envelope)
        elif role == CLOSE:
            for replica in self.replicas.values():
                replica.receive(envelope)

    def _on_lost(self, address: str, cause: str) -> None:
        """A channel broke. The registry decides what that means: it sees whether the process lives."""
        if self.registry == address:
            self.log.warning("the registry is gone: %s", cause)
        if self._on_control is not None:
            self._on_control(self.address, Suspect(address, cause))
        if self.registry is not None and self.registry not in (address, self.address):
            self.post(self.registry, Suspect(address, cause))

    def apply(self, roster: Roster) -> None:
        """Take a newer view of who lives: answer deaths, forget the requests of dead gateways."""
        before = self.roster.dead.keys() | self.roster.live.keys()
        if not self.roster.apply(roster):
            return
        changed = any(replica in before for replica in self.roster.dead) or bool(self.roster.successors)
        for replica in self.replicas.values():
            for gateway in self.roster.gateways_gone:
                replica.gateway_gone(gateway)
            if changed:
                for party in list(replica.parties.values()):
                    party.roster_changed()
        if self.gateway is not None:
            self.gateway.roster_changed()
        for answers in self._censuses.values():
            answers.only(self.roster.live)
        self.schedule_flush()

    # ---- sending --------------------------------------------------------------------------------------------

    def post(self, address: str, packet: Any) -> None:
        """Queue a packet that belongs to no party."""
        self._posts.append((address, packet))
        self.schedule_flush()

    def schedule_flush(self) -> None:
        """Flush at the end of this tick, once."""
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Send all that parties have queued, one batch per peer; what is for this node itself is taken at once."""
        if self._flushing or not (self.dirty or self._posts):
            return
        self._flushing = True
        here = self.transport.address
        try:
            while self.dirty or self._posts:
                batches: dict[str, list[Any]] = {}
                own: list[Any] = []
                for address, packet in self._take_posts():
                    if address == here:
                        own.append(packet)
                    else:
                        batches.setdefault(address, []).append(packet)
                dirty, self.dirty = self.dirty, []
                for box in dirty:
                    out, box.out = box.out, {}
                    if not box.over:
                        self._collect(box, out, here, batches, own)
                for address, batch in batches.items():
                    self._send(address, batch)
                for item in own:
                    self._take(here, item)
        finally:
            self._flushing = False

    def _take_posts(self) -> Iterable[tuple[str, Any]]:
        if not self._posts:
            return ()
        posts, self._posts = self._posts, []
        return posts

    def _collect(
        self, box: Outbox, out: dict[int, list[Any]], here: str, batches: dict[str, list[Any]], own: list[Any]
    ) -> None:
        for key, messages in out.items():
            if key == TO_GATEWAY:
                address: str | None = box.info.address
                envelope = Envelope(box.head, box.book.oldest, GATEWAY_ROLE, 0, messages)
            else:
                role, share = key >> SHARE_BITS, key & SHARE_MASK
                address = box.address(key)
                if address is None:
                    if not self.keeps[role] or self.roster.given_up(box.info.replicas[role], share):
                        replica = box.info.replicas[role][share]
                        box.lose(role, share, f"replica {replica} died: {self.roster.cause(replica)}")
                    for message in messages:
                        if type(message.value) is Spilled:
                            message.value.consumers -= 1
                    continue
                envelope = Envelope(box.head, box.book.oldest, role, share, messages)
            if address is None or address == here:
                if self.values.tensors is not None:
                    envelope.messages = [self.values.received(m) for m in messages]
                own.append(envelope)
            elif address in batches:
                batches[address].append(envelope)
            else:
                batches[address] = [envelope]

    def _send(self, address: str, batch: list[Any]) -> None:
        try:
            self.transport.send(address, batch)
        except MessageTooLarge:
            for item in batch:
                if isinstance(item, Envelope) and len(item.messages) > 1:
                    for message in item.messages:
                        self.transport.send(
                            address, [Envelope(item.head, item.oldest, item.role, item.share, [message])]
                        )
                else:
                    self.transport.send(address, [item])

    def settle(self, box: Outbox) -> None:
        """The request of a party is over: what it placed in the data plane is free once its readers are done."""
        if box.spilled and self.values.settle(box.spilled):
            self.loop.call_later(SETTLE_S, self.values.settle_now)

    # ---- state ----------------------------------------------------------------------------------------------

    async def inspect(self) -> dict[str, dict[str, int]]:
        """What every live replica holds, by its id, as of the moment it is asked."""
        return (await self._ask()).held

    async def counters(self) -> dict[str, dict[str, int]]:
        """What the role of every live replica has counted, by the replica's id."""
        return (await self._ask()).counters

    async def _ask(self) -> _Answers:
        token = next(self._tokens)
        asked = {record.address: record.id for record in self.roster.live.values()}
        answers = self._censuses[token] = _Answers(dict(asked), self.loop.create_future())
        for address in asked:
            self.post(address, Inspect(self.address, token))
        self.flush()
        try:
            if asked:
                await answers.all
        finally:
            del self._censuses[token]
        return answers

    def _take_census(self, census: Census) -> None:
        answers = self._censuses.get(census.token)
        if answers is not None:
            answers.take(census)

    def census(self) -> dict[str, int]:
        """What the node's replicas hold, summed."""
        return _summed(replica.census() for replica in self.replicas.values())

    def counted(self) -> dict[str, int]:
        """What the roles of the node's replicas have counted, summed."""
        return _summed(replica.counters() for replica in self.replicas.values())


def _summed(each: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for numbers in each:
        for name, number in numbers.items():
            total[name] = total.get(name, 0) + number
    return total
