"""Switches for the rules about processes: each replaces something around the core, in the simulated surroundings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from omni_flow.control.batches import Answer, answered
from omni_flow.control.facts import ACK, Message
from omni_flow.control.ledger import Ledger
from omni_flow.control.request import Request as GatewayRequest
from omni_flow.testing import batching
from omni_flow.testing.world import Seat, World

Patch = pytest.MonkeyPatch


def the_list_of_shares_is_pinned(patch: Patch) -> None:
    """19: each sender hashes over the members that it sees."""
    init = Seat.__init__

    def live(self: Seat, around: World, key: Any) -> None:
        init(self, around, key)
        self.share.shares = [max(1, n - around.rng.randint(0, 1)) for n in self.share.shares]

    patch.setattr(Seat, "__init__", live)


def a_share_hosted_anew_starts_empty(patch: Patch) -> None:
    """20: it is merged with the share that its host has."""
    seat_of = World.seat

    def merged(self: World, key: Any) -> Seat:
        host = self.hosts[key]
        own = (key[0], self.replicas[key[0]].index(host)) if host in self.replicas[key[0]] else key
        return self.seats[own] if own in self.seats else seat_of(self, key)

    patch.setattr(World, "seat", merged)


def acks_are_kept(patch: Patch) -> None:
    """21: what was sent is kept, but for acks."""
    sent = Ledger.sent

    def forgetful(self: Ledger, role: int, to: int, message: Message, interfaces: Any) -> None:
        if message.kind != ACK:
            sent(self, role, to, message, interfaces)

    patch.setattr(Ledger, "sent", forgetful)


def what_was_sent_is_kept(patch: Patch) -> None:
    """22: nothing is said again to a share hosted anew."""
    patch.setattr(Ledger, "died", lambda self, role, to: [])


def a_loss_is_told(patch: Patch) -> None:
    """23: nobody speaks of a dead share without retries."""
    died = Ledger.died
    patch.setattr(Ledger, "died", lambda self, role, to: died(self, role, to) or [])


def the_outcome_is_said_once(patch: Patch) -> None:
    """25: a cancel that crosses the last value is an outcome too."""
    decide = GatewayRequest.decide

    def again(self: GatewayRequest, outcome: Any, failures: Any = None) -> bool:
        self.outcome = None
        return decide(self, outcome, failures)

    patch.setattr(GatewayRequest, "decide", again)


def a_closed_request_is_one_bit(patch: Patch) -> None:
    """26: close forgets the request, and a late message opens it anew."""

    def forget(self: World, key: Any, epoch: int) -> None:
        seat = self.seats.pop(key, None)
        if seat is not None:
            seat.closed = True
            seat.share.close()

    patch.setattr(World, "close", forget)


def params_are_a_snapshot(patch: Patch) -> None:
    """27: each replica reads the session's params when it needs them."""
    init = Seat.__init__

    def live(self: Seat, around: World, key: Any) -> None:
        init(self, around, key)
        self.share.params = {**self.share.params, "n": around.rng.choice([1, 2, 3])}

    patch.setattr(Seat, "__init__", live)


def a_batch_that_raises_is_run_item_by_item(patch: Patch) -> None:
    """28: who shared a batch with an item that raises fails too."""

    def together(items: Sequence[Any], answer: Any) -> Answer[Any]:
        if isinstance(answer, BaseException):
            return Answer([], [(item, answer) for item in items], [])
        return answered(items, answer)

    patch.setattr(batching, "answered", together)


def a_batch_has_the_same_parameters(patch: Patch) -> None:
    """28: all that wait are called together, whatever they were given."""
    patch.setattr(batching, "alike", lambda items: [list(items)] if items else [])


def a_closed_activation_leaves_its_batch(patch: Patch) -> None:
    """2.3: what a call gives is said although its request was closed, or its replica died, meanwhile."""
    patch.setattr(batching, "_runs", lambda member: True)
