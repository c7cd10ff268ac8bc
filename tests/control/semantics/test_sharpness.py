"""The comparison is sharp: each rule switched off alone, from out here, makes some random graph diverge.

A rule is switched off by replacing one small function or method of the real core (or of the simulated surroundings,
where the rule is one about processes). With nothing off the same graphs agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from omni_flow.control import activations, buckets, compile, joins
from omni_flow.control.batches import Answer, answered
from omni_flow.control.buckets import Node
from omni_flow.control.credit import Account, account_for
from omni_flow.control.facts import ABSENT, ACK, WAITING, Failure, Message
from omni_flow.control.inorder import InOrder
from omni_flow.control.joins import Closing, Windows
from omni_flow.control.ledger import Ledger
from omni_flow.control.plan import Interface, Route, share_of
from omni_flow.control.request import Request as GatewayRequest
from omni_flow.control.share import Share
from omni_flow.control.trees import Trees
from omni_flow.testing import batching
from omni_flow.testing.generate import random_request
from omni_flow.testing.notation import parse_graph
from omni_flow.testing.schedule import Faults
from omni_flow.testing.simulate import Report, Request, simulate
from omni_flow.testing.standins import Functions, Standins
from omni_flow.testing.world import Seat, World

Patch = pytest.MonkeyPatch
TWO_WINDOWS = """
    p*
    A: p -> a
    B: p -> b
    V: window(a, 3, stride=1) -> v
    W: window(b, 2, stride=1, left=1) -> w
    out v = v
    out w = w
"""
TWO_WINDOWS_INPUTS = {"p": [1, 2, 3, 4, 5, 6]}
TWO_WINDOWS_ROLES = Functions(
    A=lambda p: [("a", p)] if p in (2, 3, 5, 6) else [],
    B=lambda p: [("b", p)] if p in (1, 4) else [],
    V=lambda a: [("v", a)],
    W=lambda b: [("w", b)],
)
GRAPHS = 1200
SCHEDULES = 4


def first_divergence(graphs: int) -> tuple[str, ...]:
    """What the comparison finds first among random graphs; empty if nothing."""
    report = Report("sharpness", 0)
    for seed in range(graphs):
        drawn = random_request(Random(seed))
        plan = compile.compile_spec(drawn.spec)
        request = Request(plan, drawn.spec, drawn.inputs, drawn.params, Standins(drawn.spec, seed))
        for number in range(SCHEDULES):
            request.run(seed * 100 + number, number, Faults(), report)
            if report.divergences:
                return report.divergences[0].what
    return ()


def declared_order(patch: Patch) -> None:
    """1: the first group that is ready runs."""
    decide = buckets.decide
    patch.setattr(activations, "decide", lambda groups, order, leaf, race: decide(groups, order, leaf, True))


class ByArrival(InOrder):
    """Frames as they come."""

    __slots__ = ()

    def pull(self, passed: Any = None, through: bool = False) -> Any:
        if self._levels == 1 and self._cells:
            number = next(iter(self._cells))
            if passed is not None:
                passed.append(joins.Passed(self._parent, number))
            self._next += 1
            return self._cells.pop(number)
        return super().pull(passed, through)

    def add(self, path: Any, cell: Any) -> bool:
        if self._levels == 1:
            self._cells.setdefault(path[0], cell)
            return True
        return super().add(path, cell)


def frames_in_order_of_joins(patch: Patch) -> None:
    """3: joins take frames as they arrive."""
    patch.setattr(joins, "InOrder", ByArrival)


def count_waits_for_n(patch: Patch) -> None:
    """4: a count whose n is not known yet takes one."""
    count = Closing._count

    def impatient(self: Closing) -> Any:
        if self.n is WAITING:
            self.n = 1
        return count(self)

    patch.setattr(Closing, "_count", impatient)


def lists_are_never_empty(patch: Patch) -> None:
    """5: nothing present is an empty list."""
    decide = Closing.decide

    def empty(self: Closing) -> Any:
        cell = decide(self)
        return [] if cell is ABSENT else cell

    patch.setattr(Closing, "decide", empty)


def creators_send_ends_to_all_under_them(patch: Patch) -> None:
    """6: the end goes only to who reads the stream itself."""
    source_of = compile._Compiler._source

    def direct(self: Any, name: str, *rest: Any) -> Any:
        source = source_of(self, name, *rest)
        if source.kind != "stream":
            return source
        field = self.field_ids[name]
        readers = {i.id for i in self.interfaces if any(slot.field == field for slot in i.slots)}
        return replace(source, ends=tuple(r for r in source.ends if readers & set(r.interfaces)))

    patch.setattr(compile._Compiler, "_source", direct)


def route_by_slot(patch: Patch) -> None:
    """7: a message goes where its own path hashes to."""
    patch.setattr(Route, "targets", lambda self, path, shares: (share_of(path, shares),))


def tombstones_per_slot_prefix(patch: Patch) -> None:
    """8: a closed bucket swallows what carries its path."""
    fact, close = Share._fact, Share._finish
    gone: set[tuple[int, int, tuple[int, ...]]] = set()

    def finish(self: Share, interface: Interface, node: Node) -> None:
        gone.add((id(self), interface.id, node.path))
        close(self, interface, node)

    def swallow(self: Share, interface: Interface, slot: Any, path: Any, cell: Any) -> None:
        if (id(self), interface.id, path) not in gone:
            fact(self, interface, slot, path, cell)

    def fresh(self: Share, *args: Any) -> None:
        init(self, *args)
        gone.difference_update([key for key in gone if key[0] == id(self)])

    init = Share.__init__
    patch.setattr(Share, "__init__", fresh)
    patch.setattr(Share, "_finish", finish)
    patch.setattr(Share, "_fact", swallow)


def an_end_closes_no_bucket(patch: Patch) -> None:
    """9: when the end is known the prefix is done."""
    patch.setattr(Trees, "_mine", lambda self, interface, node: 0)


def feedback_groups_apply_from_iteration_1(patch: Patch) -> None:
    """12: the entry groups apply at each iteration."""
    interface_of = compile._Compiler._interface

    def both(self: Any, *args: Any) -> Interface:
        interface = interface_of(self, *args)
        return replace(interface, later=interface.later + interface.first if interface.later else ())

    patch.setattr(compile._Compiler, "_interface", both)


def dead_comes_before_failed(patch: Patch) -> None:
    """13: a failed slot decides at once."""
    verdict = buckets.verdict

    def hasty(group: Any, leaf: Node) -> Any:
        for entry in group:
            cell = leaf.at(entry.depth).cells[entry.slot]
            if type(cell) is Failure:
                return buckets.FAIL, cell
        return verdict(group, leaf)

    patch.setattr(buckets, "verdict", hasty)


def a_group_of_absent_slots_is_dead(patch: Patch) -> None:
    """2.3: optional slots that all are absent make a group ready."""
    verdict = buckets.verdict

    def ready(group: Any, leaf: Node) -> Any:
        if all(e.optional and leaf.at(e.depth).cells[e.slot] is ABSENT for e in group):
            return 0, None
        return verdict(group, leaf)

    patch.setattr(buckets, "verdict", ready)


def a_failed_stream_ends_torn(patch: Patch) -> None:
    """14: the end does not say that its creator failed."""
    send = Share._send_end
    patch.setattr(Share, "_send_end", lambda self, source, parent, count, _: send(self, source, parent, count, False))


def a_failure_is_no_absence(patch: Patch) -> None:
    """14: an exception leaves outputs absent, as on_error="absent" does."""
    patch.setattr(Share, "fail", lambda self, activation, cause: self.finish(activation))


def the_tail_is_flushed_for_new_frames_only(patch: Patch) -> None:
    """15: the tail is flushed although a window had all its frames."""
    stop = Windows._stop

    def flush(self: Windows) -> int | None:
        total = self._base + len(self._cells)
        return stop(self) or (total if self._over is False and self._start < total else None)

    patch.setattr(Windows, "_stop", flush)


def windows_count_present_frames(patch: Patch) -> None:
    """15: windows hold absent frames as None."""
    pull = InOrder.pull

    class WithGaps(InOrder):
        __slots__ = ()

        def pull(self, passed: Any = None, through: bool = False) -> Any:
            cell = pull(self, passed, through)
            return None if cell is ABSENT else cell

    init = Windows.__init__

    def with_gaps(self: Windows, *args: Any) -> None:
        init(self, *args)
        self.frames = WithGaps(1)

    patch.setattr(Windows, "__init__", with_gaps)


def ordered_runs_one_after_the_other(patch: Patch) -> None:
    """16: what is ready runs."""

    def at_once(self: Share, interface: Interface, parent: Node) -> None:
        for leaf in list((parent.children or {}).values()):
            if leaf.state == buckets.READY:
                self._run(interface, leaf, leaf.verdict)

    patch.setattr(Share, "_run_in_order", at_once)


def ordered_fails_after_a_failed_one(patch: Patch) -> None:
    """16: the next one runs although an earlier one failed."""
    run = Share._run_in_order

    def forgiving(self: Share, interface: Interface, parent: Node) -> None:
        parent.failed = buckets.UNFAILED
        run(self, interface, parent)

    patch.setattr(Share, "_run_in_order", forgiving)


def spool_rule(patch: Patch) -> None:
    """17, 18: each reader is waited for."""
    patch.setattr(compile, "spooled", lambda scopes: set())


def credit_fills_windows(patch: Patch) -> None:
    """18: W is not raised for windows."""

    def strict(plan: Any, source: int, shares: Any, credit: int, credit_bytes: int) -> Account:
        account = account_for(plan, source, shares, credit, credit_bytes)
        account._limit, account._floor = credit, 1
        return account

    patch.setattr(activations, "account_for", strict)
    patch.setattr("omni_flow.control.request.account_for", strict)


def credit_fills_several_windows(patch: Patch) -> None:
    """18: W is raised to what the greatest window needs, as if it were alone."""
    source_of = compile._Compiler._source

    def greatest(self: Any, name: str, *rest: Any) -> Any:
        source = source_of(self, name, *rest)
        needs = [
            slot.size + slot.left
            for i in self.interfaces
            for slot in i.slots
            if slot.join == "window" and self._field_scope(slot)[-1] == source.id
        ]
        return replace(source, at_least=max(needs, default=1))

    patch.setattr(compile._Compiler, "_source", greatest)


def the_list_of_shares_is_pinned(patch: Patch) -> None:
    """19: each sender hashes over the members that it sees."""
    init = Seat.__init__

    def live(self: Seat, around: World, key: Any) -> None:
        init(self, around, key)
        self.share.shares = [max(1, n - around.rng.randint(0, 1)) for n in self.share.shares]
        self.share._trees.shares = self.share.shares[self.share.role.id]

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


def early_acks_count(patch: Patch) -> None:
    """21: an ack of a number that is not created yet is dropped."""
    ack = Account.ack
    patch.setattr(Account, "ack", lambda self, number, reader: number < self.created and ack(self, number, reader))


def what_was_sent_is_kept(patch: Patch) -> None:
    """22: nothing is said again to a share hosted anew."""
    patch.setattr(Ledger, "died", lambda self, role, to: [])


def a_loss_is_told(patch: Patch) -> None:
    """23: nobody speaks of a dead share without retries."""
    died = Ledger.died
    patch.setattr(Ledger, "died", lambda self, role, to: died(self, role, to) or [])


def a_sink_is_awaited(patch: Patch) -> None:
    """24: an interface without outputs is nobody's business."""
    hidden = compile._with_hidden

    def unseen(spec: Any) -> Any:
        full = hidden(spec)
        return replace(full, outputs=spec.outputs)

    patch.setattr(compile, "_with_hidden", unseen)


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


def what_is_done_is_a_tombstone(patch: Patch) -> None:
    """2.3: a closed bucket leaves nothing behind."""
    patch.setattr(Node, "is_done", lambda self, number: False)

    def child(self: Node, number: int, slots: int) -> Node:
        if self.children is None:
            self.children = {}
        return self.children.get(number) or self.children.setdefault(number, Node(self, number, slots))

    patch.setattr(Node, "child", child)


def acks_close_numbers(patch: Patch) -> None:
    """2.5: readers release without saying so."""
    patch.setattr(Share, "_send_ack", lambda self, interface, source, parent, number: None)


def on_error_absent_forgives(patch: Patch) -> None:
    """2.3: on_error="absent" fails like any other."""
    interface_of = compile._Compiler._interface

    def strict(self: Any, spec: Any, *rest: Any) -> Interface:
        return interface_of(self, replace(spec, on_error="fail"), *rest)

    patch.setattr(compile._Compiler, "_interface", strict)


def bytes_fill_windows(patch: Patch) -> None:
    """2.5: a window's frames must fit into W in bytes."""
    init = Account.__init__

    def strict(self: Account, limit: int, expected: int, byte_limit: int, floor: int) -> None:
        init(self, limit, expected, byte_limit, 1)

    patch.setattr(Account, "__init__", strict)


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


RULES: Sequence[Callable[[Patch], None]] = [
    declared_order,
    frames_in_order_of_joins,
    count_waits_for_n,
    lists_are_never_empty,
    creators_send_ends_to_all_under_them,
    route_by_slot,
    tombstones_per_slot_prefix,
    an_end_closes_no_bucket,
    feedback_groups_apply_from_iteration_1,
    dead_comes_before_failed,
    a_group_of_absent_slots_is_dead,
    a_failed_stream_ends_torn,
    a_failure_is_no_absence,
    the_tail_is_flushed_for_new_frames_only,
    windows_count_present_frames,
    ordered_runs_one_after_the_other,
    ordered_fails_after_a_failed_one,
    spool_rule,
    credit_fills_windows,
    bytes_fill_windows,
    the_list_of_shares_is_pinned,
    a_share_hosted_anew_starts_empty,
    acks_are_kept,
    early_acks_count,
    what_was_sent_is_kept,
    a_loss_is_told,
    a_sink_is_awaited,
    the_outcome_is_said_once,
    a_closed_request_is_one_bit,
    params_are_a_snapshot,
    what_is_done_is_a_tombstone,
    acks_close_numbers,
    on_error_absent_forgives,
    a_batch_that_raises_is_run_item_by_item,
    a_batch_has_the_same_parameters,
    a_closed_activation_leaves_its_batch,
]


@pytest.mark.parametrize("switch_off", RULES, ids=lambda rule: rule.__name__)
def test_without_the_rule_the_comparison_finds_a_divergence(
    switch_off: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    switch_off(monkeypatch)
    assert first_divergence(GRAPHS)


def test_without_the_sum_over_all_windows_of_a_stream_two_of_them_stall(monkeypatch: Patch) -> None:
    """The rule is needed so rarely that it gets the graph it was found with."""
    credit_fills_several_windows(monkeypatch)
    report = simulate(
        parse_graph(TWO_WINDOWS),
        schedules=20,
        inputs=TWO_WINDOWS_INPUTS,
        roles=TWO_WINDOWS_ROLES,
        faults=Faults(credit=1),
    )
    assert report.outcomes["none"] > 0
