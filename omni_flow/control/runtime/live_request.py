"""One request at its gateway: what came of it so far, its outcome, and what its client does with it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_flow.control.delivery import Delivered
from omni_flow.control.facts import Failure, Message
from omni_flow.control.request import Outcome, Request
from omni_flow.control.runtime.errors import InvalidInput, RequestFailed
from omni_flow.control.runtime.party import Outbox
from omni_flow.control.runtime.prefixes import Key, Prefix
from omni_flow.control.runtime.wire import LINEAGE, LOST, PREFIX, TIMELINE, Head
from omni_flow.refs import ABSENT

if TYPE_CHECKING:
    from omni_flow.control.runtime.gateway import Gateway


@dataclass(frozen=True, slots=True)
class Span:
    """One activation of a request: when it was queued, started and ended (seconds since the epoch), and where.

    `note`: what its role said last with `ctx.progress`.
    """

    interface: str
    path: str
    replica: str
    queued: float
    started: float
    ended: float
    note: str = ""


class LiveRequest(Outbox):
    """A request at its gateway: what the clients hold, in the loop's thread."""

    def __init__(
        self,
        gateway: Gateway,
        head: bytes,
        info: Head,
        outputs: Collection[str] | None = None,
        keys: Sequence[Key] = (),
    ) -> None:
        super().__init__(gateway.node, head, info, gateway.book)
        self._keys = keys
        self.gateway = gateway
        self.outcome: Outcome | None = None
        self.failures: dict[str, Failure] = {}
        self.spans: list[Span] = []
        self.started = time.monotonic()
        node = gateway.node
        self.decode = node.values.decode  # no method of this object: what keeps it must not keep the request
        self._request = Request(node.plan, self.counts, info.params, self, node.credit, node.credit_bytes, outputs)
        self._values: deque[tuple[str, Any, Delivered]] = deque()
        self._collect = False
        self._collected: dict[str, list[Any]] = {o.name: [] for o in node.plan.outputs if not o.hidden}
        self._waiter: asyncio.Future[None] | None = None
        self._credit: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    # ---- GatewayHost ----------------------------------------------------------------------------------------

    def deliver(self, delivered: Delivered) -> None:
        output = self.node.plan.outputs[delivered.output]
        value = delivered.value
        value = [self.decode(v) for v in value] if type(value) is list else self.decode(value)
        if self._collect:
            self._collected[output.name].append(value)
            if delivered.passed:
                self._request.consumed(delivered)
            return
        self._values.append((output.name, value, delivered))
        self._wake()

    def resume(self, placeholder: str) -> None:
        waiter = self._credit.pop(placeholder, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def decided(self, outcome: Outcome, failures: Mapping[str, Failure]) -> None:
        self.outcome = outcome
        self.failures = dict(failures)
        self.over = True
        self.out = {}
        if self._timer is not None:
            self._timer.cancel()
        self._wake()  # before the closes are queued: the client goes on first, and what it sends next travels with them
        self.gateway.finished(self)
        self._request.leave()
        self.node.settle(self)
        for waiter in self._credit.values():
            if not waiter.done():
                waiter.set_result(None)

    # ---- life -----------------------------------------------------------------------------------------------

    def begin(self, payloads: Mapping[str, Any]) -> None:
        """Inject the placeholders and set the deadline."""
        if self.info.deadline_s is not None:
            self._timer = self.node.loop.call_later(max(self.info.deadline_s, 0.0), self._expire)
        for payload in payloads.values():
            self.note(payload)
        self._request.start(payloads)

    def receive(self, message: Message) -> None:
        """Take a message of a share."""
        if message.kind < LOST:
            self._request.receive(message)
        elif message.kind == LOST:
            role = self.node.plan.roles[message.ref].spec.name
            self.fail(role, str(message.value))
        elif message.kind == TIMELINE:
            self._note_span(message)
        elif message.kind == PREFIX:
            pool, marks = message.value
            self.gateway.learned(self._keys, message.ref, Prefix(pool, marks))
        elif message.kind == LINEAGE:
            self.gateway.advanced(self.info, message.ref, message.value)

    def _note_span(self, message: Message) -> None:
        interface = self.node.plan.interfaces[message.ref]
        path = self.node.plan.show(interface.scope, message.path)
        self.spans.append(Span(interface.name, path, *message.value))

    def lose(self, role: int, share: int, cause: str) -> None:
        """A share this gateway sent to is lost."""
        self.fail(self.node.plan.roles[role].spec.name, cause)

    def fail(self, what: str, cause: str) -> None:
        """End the request as failed: something it needs is gone."""
        failure = Failure(what, "", cause)
        undecided = {o.name for o in self.node.plan.outputs if not o.hidden}
        self._request.decide(Outcome.FAILED, dict.fromkeys(sorted(undecided), failure))

    def cancel(self) -> bool:
        """End the request as cancelled. False if it has ended already."""
        return self._request.decide(Outcome.CANCELLED)

    def _expire(self) -> None:
        self._request.decide(Outcome.DEADLINE)

    def successors(self) -> list[str]:
        """Replicas outside the pinned lists that may host shares of this request by now."""
        successors = self.node.roster.successors
        found: list[str] = []
        for replica in (r for hosts in self.info.replicas for r in hosts if r in successors):
            while (successor := successors.get(replica)) is not None and successor != replica:
                replica = successor
            found.append(replica)
        return found

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self.node.loop.create_future()
        await self._waiter
        self._waiter = None

    # ---- what the client does -------------------------------------------------------------------------------

    async def push(self, placeholder: str, value: Any) -> None:
        """Send the next frame of a streamed placeholder; waits for credit.

        Raises:
            InvalidInput: not a streamed placeholder, ended before, or a value of the wrong type.
        """
        self._check_streamed(placeholder)
        payload, size = self.gateway.encode_input(placeholder, value)
        while self.outcome is None and not self._request.may_push(placeholder):
            waiter = self._credit.get(placeholder)
            if waiter is None:
                waiter = self._credit[placeholder] = self.node.loop.create_future()
            await asyncio.shield(waiter)
        if self.outcome is not None:
            return
        try:
            self.note(payload)
            self._request.push(placeholder, payload, size)
        except ValueError as wrong:
            raise InvalidInput(placeholder, str(wrong)) from wrong
        self.node.schedule_flush()

    def end(self, placeholder: str) -> None:
        """Say that a streamed placeholder has no more frames. Raises InvalidInput."""
        self._check_streamed(placeholder)
        if self.outcome is None:
            self._request.end(placeholder)
            self.node.schedule_flush()

    def _check_streamed(self, placeholder: str) -> None:
        if placeholder not in self.gateway.streamed:
            raise InvalidInput(placeholder, "the graph has no streamed placeholder of that name")

    async def values(self) -> AsyncIterator[tuple[str, Any]]:
        """Outputs as they come, as (name, value); ends with the outcome and does not raise for it."""
        while True:
            while self._values:
                name, value, delivered = self._values.popleft()
                self._collected[name].append(value)
                if delivered.passed:
                    self._request.consumed(delivered)
                    self.node.schedule_flush()
                yield name, value
            if self.outcome is not None:
                return
            await self._wait()

    async def batch(self) -> list[tuple[str, Any]]:
        """The outputs at hand, as (name, value), at least one; none when the request is over.

        They are the caller's: `result` and `partial` don't have them.
        """
        while not self._values:
            if self.outcome is not None:
                return []
            await self._wait()
        taken = []
        flush = False
        while self._values:
            name, value, delivered = self._values.popleft()
            taken.append((name, value))
            if delivered.passed:
                self._request.consumed(delivered)
                flush = True
        if flush:
            self.node.schedule_flush()
        return taken

    async def result(self) -> dict[str, Any]:
        """All outputs: a value (or ABSENT) outside any stream, a list inside one.

        Raises:
            RequestFailed: the outcome is not done; it carries the outcome, the failures and what came before.
        """
        self._collect = True
        while self._values:
            name, value, delivered = self._values.popleft()
            self._collected[name].append(value)
            if delivered.passed:
                self._request.consumed(delivered)
        self.node.schedule_flush()
        while self.outcome is None:
            await self._wait()
        if self.outcome is Outcome.DONE:
            return self.partial()
        raise RequestFailed(self.outcome, self.failures, self.partial())

    def partial(self) -> dict[str, Any]:
        """What was taken so far, in the form of `result`."""
        found: dict[str, Any] = {}
        for output in self.node.plan.outputs:
            if not output.hidden:
                values = self._collected[output.name]
                found[output.name] = values if output.depth else (values[0] if values else ABSENT)
        return found
