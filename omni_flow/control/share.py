"""A share: one role's part of one request on one replica. The pure heart of the control flow.

It takes messages in any order and any number of times, and says when an activation may run and what is to be sent. It
knows no clock, socket or role code; a `Host` does what it asks for.

It is one state machine in three layers, of which none calls up. At the bottom `trees.py` knows which prefixes there
are; on it `activations.py` judges buckets, runs and closes them; this module is what a message does to slots and joins.

The host calls `receive` for each message, and for a running activation `give` for each output, then `finish` or `fail`.
A host must not call back into the share from `send`, `to_gateway` or `start`: it queues.
"""

from __future__ import annotations

from collections.abc import Mapping

from omni_flow.control.activations import Activations
from omni_flow.control.buckets import OPEN, Node
from omni_flow.control.facts import ABSENT, ACK, END, FAILED, MISSING, WAITING, Cell, Failure, Message
from omni_flow.control.host import Activation
from omni_flow.control.joins import Closing, Windows
from omni_flow.control.plan import EndReader, Interface, Path, Slot
from omni_flow.control.spec import Join, ParamRef
from omni_flow.control.trees import nodes_at


class Share(Activations):
    """The activations of one share, and what messages do to them."""

    __slots__ = ()

    # ---- messages -------------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Take one message. Duplicates and messages for what is done are dropped and counted."""
        kind = message.kind
        if kind <= FAILED:
            cell = ABSENT if kind == MISSING else message.value
            path = message.path
            for k, slot in self.role.facts[message.ref]:
                self._fact(self.interfaces[k], slot, path, cell)
        elif kind == END:
            for reader in self.role.ends[message.ref]:
                self._end(reader, message)
        elif kind == ACK:
            self._ack(message)
        else:
            raise ValueError(f"a share takes facts, ends and acks, not message kind {kind}")

    def _fact(self, interface: Interface, slot: Slot, path: Path, cell: Cell) -> None:
        if self._hashed and not self._owns(interface, path, slot.depth):
            return
        if slot.join is Join.PLAIN:
            if slot.back:
                if path[-1] + 1 >= interface.max_iters:
                    return
                path = (*path[:-1], path[-1] + 1)
            node = self._node(interface, path)
            if node is None or node.cells[slot.index] is not WAITING:
                self.dropped += 1
                return
            node.cells[slot.index] = cell
            if slot.index in interface.count_users:
                self._set_n(interface, node, slot, cell)
            self._changed(interface, node, slot)
        elif slot.join is Join.WINDOW:
            node = self._node(interface, path[:-1])
            if node is None:
                self._release_frames(interface, slot, path[:-1], [path[-1]])
                return
            windows = self._windows(interface, node, slot)
            windows.add(path[-1], cell)
            self._cut(interface, node, slot, windows)
        else:
            node = self._node(interface, path[: slot.depth])
            if node is None or node.cells[slot.index] is not WAITING:
                self.dropped += 1
                return
            join = self._closing(interface, node, slot)
            join.frames.add(path[slot.depth :], cell)
            self._settle(interface, node, slot, join)

    def _end(self, reader: EndReader, message: Message) -> None:
        interface = self.interfaces[reader.interface]
        path, count, torn = message.path, message.number, message.value
        for index in reader.slots:
            slot = interface.slots[index]
            if self._hashed and not self._owns(interface, path, min(len(path), slot.depth)):
                continue
            node = self._node(interface, path[: slot.depth])
            if slot.join is Join.WINDOW:
                if node is not None:
                    windows = self._windows(interface, node, slot)
                    windows.frames.end((), count, torn)
                    self._cut(interface, node, slot, windows)
            elif node is not None and node.cells[index] is WAITING:
                join = self._closing(interface, node, slot)
                join.frames.end(path[slot.depth :], count, torn)
                self._settle(interface, node, slot, join)
        if reader.scope and not (self._hashed and not self._owns(interface, path, len(path))):
            node = self._node(interface, path)
            if node is not None and node.count is None:
                node.count, node.torn = count, torn
                self._release(interface, node)

    def _ack(self, message: Message) -> None:
        source = self.plan.sources[message.ref]
        interface = self.plan.interfaces[source.creator]
        key = (message.ref, message.path)
        account = self.draining.get(key)
        if account is not None:
            if account.ack(message.number, message.value) and account.open == 0:
                del self.draining[key]
            return
        node = self._node(interface, message.path)
        if node is None:
            return
        account = self._account(node, source.id)
        if not account.ack(message.number, message.value):
            return
        if source.id == interface.window:
            assert interface.window_slot is not None
            slot = interface.slots[interface.window_slot]
            self._cut(interface, node, slot, self._windows(interface, node, slot))
        elif node.activation is not None:
            self.host.resume(self, node.activation)

    # ---- slots ----------------------------------------------------------------------------------------------

    def _closing(self, interface: Interface, node: Node, slot: Slot) -> Closing:
        if node.joins is None:
            node.joins = {}
        join = node.joins.get(slot.index)
        if join is None:
            join = node.joins[slot.index] = Closing(slot.join, slot.levels, self._n(interface, node, slot))
        assert isinstance(join, Closing)
        return join

    def _n(self, interface: Interface, node: Node, slot: Slot) -> Cell:
        """What is known of a count's n."""
        if slot.n_slot is not None:
            cell = node.at(interface.slots[slot.n_slot].depth).cells[slot.n_slot]
            return self._decoded(cell)
        if isinstance(slot.n, ParamRef):
            return self.params[slot.n.name]
        return slot.n

    def _decoded(self, cell: Cell) -> Cell:
        return cell if cell is WAITING or cell is ABSENT or type(cell) is Failure else self.host.decode(cell)

    def _set_n(self, interface: Interface, node: Node, slot: Slot, cell: Cell) -> None:
        """The n of some counts became known at `node`: give it to those gathering at or below it."""
        n = self._decoded(cell)
        for user in interface.count_users[slot.index]:
            depth = interface.slots[user].depth
            for below in list(nodes_at(node, depth - len(node.path))):
                join = below.joins.get(user) if below.joins else None
                if isinstance(join, Closing) and below.cells[user] is WAITING:
                    join.n = n
                    self._settle(interface, below, interface.slots[user], join)

    def _settle(self, interface: Interface, node: Node, slot: Slot, join: Closing) -> None:
        """Decide a closing join if its frames in order allow it, and open the bucket it belongs to."""
        cell = join.decide()
        if cell is not WAITING:
            node.cells[slot.index] = cell
            assert node.joins is not None
            del node.joins[slot.index]
        self._changed(interface, node, slot)

    def _windows(self, interface: Interface, node: Node, slot: Slot) -> Windows:
        if node.joins is None:
            node.joins = {}
        join = node.joins.get(slot.index)
        if join is None:
            join = node.joins[slot.index] = Windows(slot, self.host.decode)
        assert isinstance(join, Windows)
        return join

    def _cut(self, interface: Interface, node: Node, slot: Slot, windows: Windows) -> None:
        """Bring forth the windows that exist and for which there is credit."""
        assert interface.window is not None
        account = self._account(node, interface.window)
        while windows.result is None and account.may_create():
            try:
                values = windows.next()
            except Exception as error:
                self.host.report(self, interface, node.path, error)
                windows.tear()
                break
            if values is None:
                break
            leaf = node.child(account.create(), len(interface.slots))
            assert leaf is not None
            leaf.cells[slot.index] = values
            leaf.state = OPEN
            self._evaluate(interface, leaf)
        if windows.released:
            numbers, windows.released = windows.released, []
            self._release_frames(interface, slot, node.path, numbers)
        if windows.result is not None and node.count is None:
            node.count, node.torn = windows.result
            self._send_end(interface.window, node.path, node.count, node.torn)
            self._release(interface, node)

    def _release_frames(self, interface: Interface, slot: Slot, parent: Path, numbers: list[int]) -> None:
        """Acknowledge frames that no window needs any more."""
        if not interface.acks_frames:
            return
        source = self.plan.fields[slot.field].scope[-1]
        for number in numbers:
            self._send_ack(interface, source, parent, number)

    # ---- the end --------------------------------------------------------------------------------------------

    def close(self) -> list[Activation]:
        """The request is over: forget everything. Returns the activations that still run, for the host to cancel."""
        running = list(self.running)
        for activation in running:
            activation.closed = True
        self.running.clear()
        self.draining.clear()
        self._clear()
        return running

    def census(self) -> Mapping[str, int]:
        """What is left: open nodes, running activations, open numbers, interfaces touched that are no tombstone."""
        nodes = list(self._nodes())
        open_numbers = sum(a.open for n in nodes for a in (n.accounts or {}).values())
        return {
            "nodes": len(nodes),
            "running": len(self.running),
            "open_numbers": open_numbers + sum(a.open for a in self.draining.values()),
            "untouched": self._untouched(),
        }
