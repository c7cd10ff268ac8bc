"""Switches for the rules of the real core: each replaces a function or method of compiler, buckets, joins or shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omni_flow.control import activations, buckets, compile, joins
from omni_flow.control.buckets import Node
from omni_flow.control.credit import Account, account_for
from omni_flow.control.facts import ABSENT, WAITING, Failure
from omni_flow.control.inorder import InOrder
from omni_flow.control.joins import Closing, Windows
from omni_flow.control.plan import Interface, Route, share_of
from omni_flow.control.share import Share

Patch = pytest.MonkeyPatch


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
    patch.setattr(Share, "_mine", lambda self, interface, node: 0)


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


def early_acks_count(patch: Patch) -> None:
    """21: an ack of a number that is not created yet is dropped."""
    ack = Account.ack
    patch.setattr(Account, "ack", lambda self, number, reader: number < self.created and ack(self, number, reader))


def a_sink_is_awaited(patch: Patch) -> None:
    """24: an interface without outputs is nobody's business."""
    hidden = compile._with_hidden

    def unseen(spec: Any) -> Any:
        full = hidden(spec)
        return replace(full, outputs=spec.outputs)

    patch.setattr(compile, "_with_hidden", unseen)


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
