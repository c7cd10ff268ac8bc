"""The gateway's side of one request: what it injects, what it delivers, and the one outcome. Pure.

The gateway creates the facts of placeholders and the numbers of streamed ones, collects its own outputs and decides the
outcome once: done or failed when all outputs are decided, else cancelled, deadline or lost. Nobody else counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

from omni_flow.control.credit import UNBOUNDED, Account, account_for
from omni_flow.control.delivery import Delivered, Delivery
from omni_flow.control.facts import ABSENT, ACK, END, FAILED, MISSING, Cell, Failure, Message, fact
from omni_flow.control.inorder import Passed
from omni_flow.control.plan import GATEWAY, InterfaceId, Plan, SourceId, share_of


class Outcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


class GatewayHost(Protocol):
    """What a request needs from the gateway around it."""

    def send(self, role: int, share: int, message: Message, interfaces: tuple[InterfaceId, ...]) -> None:
        """Send to a share of the request."""

    def deliver(self, delivered: Delivered) -> None:
        """Hand a value to the client, later; then call `consumed`."""

    def resume(self, placeholder: str) -> None:
        """Credit came back: the client may send the next frame of a streamed placeholder."""

    def decided(self, outcome: Outcome, failures: Mapping[str, Failure]) -> None:
        """The outcome, said once. Send close to every share."""

    def decode(self, payload: Any) -> Any:
        """The value in a payload."""


class _Nobody:
    """The host of a request that its gateway has forgotten."""

    def send(self, role: int, share: int, message: Message, interfaces: tuple[InterfaceId, ...]) -> None:
        """Nobody listens."""

    def deliver(self, delivered: Delivered) -> None:
        """Nobody takes it."""

    def resume(self, placeholder: str) -> None:
        """Nobody waits."""

    def decided(self, outcome: Outcome, failures: Mapping[str, Failure]) -> None:
        """Decided before."""

    def decode(self, payload: Any) -> Any:
        """The payload itself: what is made of it is of no interest."""
        return payload


class Request:
    """One request at its gateway. `shares[r]` is the number of shares of role r, `params` the snapshot.

    `outputs`: those the client wants, by name; the others are neither delivered nor awaited. None: all.
    """

    __slots__ = ("_accounts", "_deliveries", "_ended", "_undecided", "_wanted", "credit",
                 "credit_bytes", "host", "outcome", "params", "plan", "shares")  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        shares: Sequence[int],
        params: Mapping[str, Any],
        host: GatewayHost,
        credit: int | None = None,
        credit_bytes: int = UNBOUNDED,
        outputs: Collection[str] | None = None,
    ) -> None:
        self.plan = plan
        self.shares = shares
        self.params = params
        self.host = host
        self.credit = plan.credit if credit is None else credit
        self.credit_bytes = credit_bytes
        self.outcome: Outcome | None = None
        self._accounts: dict[SourceId, Account] = {}
        self._ended: set[str] = set()
        self._deliveries = [Delivery(o, params, host.decode) for o in plan.outputs]
        self._wanted = [outputs is None or o.hidden or o.name in outputs for o in plan.outputs]
        self._undecided = sum(self._wanted)

    # ---- placeholders ---------------------------------------------------------------------------------------

    def start(self, inputs: Mapping[str, Any]) -> None:
        """Inject the facts of all placeholders that are not streamed; those not in `inputs` are absent."""
        for placeholder in self.plan.spec.placeholders:
            if not placeholder.stream:
                self._say(placeholder.name, (), inputs.get(placeholder.name, ABSENT))
        self._check()

    def may_push(self, placeholder: str) -> bool:
        """Whether the client may send the next frame of a streamed placeholder now."""
        return self._account(placeholder).may_create()

    def push(self, placeholder: str, payload: Any, size: int = 0) -> None:
        """Inject the next frame of a streamed placeholder. Ask `may_push` first."""
        if placeholder in self._ended:
            raise ValueError(f"placeholder {placeholder!r} of this request was ended before")
        self._say(placeholder, (self._account(placeholder).create(size),), payload)
        self._check()

    def end(self, placeholder: str) -> None:
        """Say that a streamed placeholder has no more frames."""
        if placeholder in self._ended:
            return
        self._ended.add(placeholder)
        source_id = self.plan.source_ids.get(placeholder)
        if source_id is None:
            return
        source = self.plan.sources[source_id]
        count = self._account(placeholder).created
        message = Message(END, source_id, (), count, False)
        for route in source.ends:
            for share in route.targets((), self.shares[route.role]):
                self.host.send(route.role, share, message, route.interfaces)
        if source.ends_to_gateway:
            self._receive_end(message)
        self._check()

    def _account(self, placeholder: str) -> Account:
        source = self.plan.source_ids[placeholder]
        account = self._accounts.get(source)
        if account is None:
            account = self._accounts[source] = account_for(
                self.plan, source, self.shares, self.credit, self.credit_bytes
            )
        return account

    def _say(self, placeholder: str, path: tuple[int, ...], cell: Cell) -> None:
        field = self.plan.fields[self.plan.field_ids[placeholder]]
        message = fact(field.id, path, cell)
        for route in field.routes:
            for share in route.targets(path, self.shares[route.role]):
                self.host.send(route.role, share, message, route.interfaces)
        if field.to_gateway:
            self._receive_fact(message)

    # ---- outputs --------------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Take a message from a share. After the outcome it only serves to give credit back."""
        if message.kind <= FAILED:
            self._receive_fact(message)
        elif message.kind == END:
            self._receive_end(message)
        elif message.kind == ACK:
            self._ack(message)
            return
        self._check()

    def _receive_fact(self, message: Message) -> None:
        cell = ABSENT if message.kind == MISSING else message.value
        for delivery in self._deliveries:
            if delivery.output.field == message.ref:
                delivery.fact(message.path, cell)
                self._pull(delivery)
            if delivery.output.n_field == message.ref:
                delivery.n(message.path, cell)
                self._pull(delivery)

    def _receive_end(self, message: Message) -> None:
        for delivery in self._deliveries:
            if message.ref in delivery.output.scope:
                delivery.end(message.path, message.number, message.value)
                self._pull(delivery)

    def _pull(self, delivery: Delivery) -> None:
        decided, wanted = delivery.decided, self._wanted[delivery.output.index]
        given, idle = delivery.pull()
        for item in given:
            if delivery.output.hidden or self.outcome is not None or not wanted:
                idle += item.passed
            else:
                self.host.deliver(item)
        self._acknowledge(delivery, idle)
        if delivery.decided and not decided and wanted:
            self._undecided -= 1

    def consumed(self, delivered: Delivered) -> None:
        """The client took a value: the numbers that are done with it may be acknowledged."""
        self._acknowledge(self._deliveries[delivered.output], delivered.passed)

    def _acknowledge(self, delivery: Delivery, passed: Sequence[Passed]) -> None:
        for parent, number in passed:
            source = self.plan.sources[delivery.output.scope[len(parent)]]
            reader = (GATEWAY, delivery.output.index)
            if not any((r.interface, r.output) == reader for r in source.readers):
                continue
            message = Message(ACK, source.id, parent, number, reader)
            if source.creator == GATEWAY:
                self._ack(message)
                continue
            creator = self.plan.interfaces[source.creator]
            share = share_of(parent[: creator.route], self.shares[creator.role])
            self.host.send(creator.role, share, message, (creator.id,))

    def _ack(self, message: Message) -> None:
        name = self.plan.sources[message.ref].name
        if self._account(name).ack(message.number, message.value):
            self.host.resume(name)

    # ---- outcome --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._undecided == 0:
            failed = any(d.failure is not None for d in self._awaited())
            self.decide(Outcome.FAILED if failed else Outcome.DONE)

    def decide(self, outcome: Outcome, failures: Mapping[str, Failure] | None = None) -> bool:
        """Decide the outcome, if it is not decided yet: also for cancel, deadline and loss. True if this decided it."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        if failures is None:
            failures = {d.output.label: d.failure for d in self._awaited() if d.failure is not None}
        self.host.decided(outcome, failures)
        return True

    def _awaited(self) -> list[Delivery]:
        return [d for d in self._deliveries if self._wanted[d.output.index]]

    def leave(self) -> None:
        """The gateway has forgotten this request: from now on it talks to nobody, and holds its host no longer."""
        self.host = _Nobody()

    @property
    def open_numbers(self) -> int:
        """Numbers of streamed placeholders that are still open."""
        return sum(a.open for a in self._accounts.values())
