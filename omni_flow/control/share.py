"""A share: one role's part of one request on one replica. The pure heart of the control flow.

It takes messages in any order and any number of times, and says when an activation may run and what is to be sent. It
knows no clock, socket or role code; a `Host` does what it asks for. `buckets.py` has the tree it keeps, `joins.py` the
gathering slots, `credit.py` the creators' accounts.

The host calls `receive` for each message, and for a running activation `give` for each output, then `finish` or `fail`.
A host must not call back into the share from `send`, `to_gateway` or `start`: it queues.

The file is long because it is one state machine: every step reads and changes the same tree and its accounts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from omni_flow.control.buckets import DEAD, FAIL, OPEN, READY, RUNNING, WAIT, Node, decide, inputs
from omni_flow.control.credit import UNBOUNDED, Account
from omni_flow.control.facts import (
    ABSENT,
    ACK,
    END,
    FAILED,
    MISSING,
    WAITING,
    Cell,
    Failure,
    Message,
    Torn,
    fact,
)
from omni_flow.control.joins import Closing, Windows
from omni_flow.control.plan import GATEWAY, EndReader, Interface, InterfaceId, Path, Plan, RolePlan, Slot, share_of
from omni_flow.control.spec import Join, ParamRef

TOMBSTONE: Final = Node(None, 0, 0)
"""Stands for an interface all of whose activations on this share are closed."""


NO_ACCOUNTS: Final[Mapping[int, Account]] = {}


class RoleError(Exception):
    """Role code broke a rule of its outputs: gave one twice, one that doesn't exist, or a frame after the end."""


class Host(Protocol):
    """What a share needs from the shell around it (a replica, or the simulator)."""

    def send(self, role: int, share: int, message: Message, interfaces: tuple[InterfaceId, ...]) -> None:
        """Send to a share of `role`, perhaps this one. `interfaces` are those that read it there."""

    def to_gateway(self, message: Message) -> None:
        """Send to the request's gateway."""

    def start(self, share: Share, activation: Activation) -> None:
        """Run `activation`: call the role's method with its inputs, later."""

    def resume(self, share: Share, activation: Activation) -> None:
        """Credit came back: a stream of `activation` that had to wait may go on."""

    def decode(self, payload: Any) -> Any:
        """The value in a payload (joins look at values: a count's n, the frames a window policy cuts)."""

    def report(self, share: Share, interface: Interface, path: Path, error: Exception) -> None:
        """A window policy raised `error`; its windows end torn."""


class Activation:
    """One execution of an interface. `inputs` is by parameter; `given[k]` counts what output k has said."""

    __slots__ = ("closed", "context", "given", "group", "inputs", "interface", "node")

    def __init__(self, interface: Interface, node: Node, group: int) -> None:
        self.interface = interface
        self.node = node
        self.group = group
        self.inputs: dict[str, Any] = inputs(interface.groups[group], node)
        self.given = [0] * len(interface.outputs)
        self.closed = False
        self.context: Any = None

    @property
    def path(self) -> Path:
        return self.node.path

    @property
    def iteration(self) -> int:
        """The number of the innermost loop iteration, for a head's activation."""
        return self.node.number

    @property
    def last_iteration(self) -> bool:
        """Whether `max_iters` ends the loop with this iteration of a head."""
        return self.interface.loop is not None and self.node.number + 1 == self.interface.max_iters


class Share:
    """Share `index` of `role` in one request.

    `shares[r]` is the number of shares of role r, `params` the request's snapshot, `credit` W in numbers and
    `credit_bytes` in bytes per parent.
    """

    __slots__ = ("_hashed", "_roots", "credit", "credit_bytes",
                 "draining", "dropped", "host", "index", "interfaces", "params", "plan", "role", "running",
                 "shares", "stopped_by_max_iters")  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        role: RolePlan,
        index: int,
        shares: Sequence[int],
        params: Mapping[str, Any],
        host: Host,
        credit: int | None = None,
        credit_bytes: int = UNBOUNDED,
    ) -> None:
        self.plan = plan
        self.role = role
        self.index = index
        self.shares = shares
        self.params = params
        self.host = host
        self.credit = plan.credit if credit is None else credit
        self.credit_bytes = credit_bytes
        self.interfaces = role.members
        self.running: set[Activation] = set()
        self.draining: dict[tuple[int, Path], Account] = {}
        self.dropped = 0
        self.stopped_by_max_iters = 0
        self._roots: list[Node | None] = [None] * len(role.members)
        self._hashed = shares[role.id] > 1

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

    def _owns(self, interface: Interface, path: Path, known: int) -> bool:
        """Whether this share runs the activations of `interface` under `path`, of which `known` numbers count."""
        route = interface.route
        return route > known or share_of(path[:route], self.shares[interface.role]) == self.index

    def _node(self, interface: Interface, path: Path) -> Node | None:
        """The node at `path`, made if need be; None if it is done or doesn't exist."""
        node = self._roots[interface.index]
        slots = len(interface.slots)
        if node is None:
            node = self._roots[interface.index] = Node(None, 0, slots)
        elif node is TOMBSTONE:
            return None
        for number in path:
            if node.count is not None and number >= node.count:
                return None
            child = node.child(number, slots)
            if child is None:
                return None
            node = child
        return node

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
            for below in list(_nodes_at(node, depth - len(node.path))):
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

    # ---- buckets --------------------------------------------------------------------------------------------

    def _changed(self, interface: Interface, node: Node, slot: Slot) -> None:
        """Something became known at `node` for `slot`: open the bucket it opens, evaluate those it concerns."""
        depth = len(interface.scope)
        if len(node.path) == depth:
            if node.state == 0:
                node.state = OPEN
            self._evaluate(interface, node)
            return
        if interface.loop is not None and slot.index in interface.entry_slots and len(node.path) == depth - 1:
            first = node.child(0, len(interface.slots))
            if first is not None and first.state == 0:
                first.state = OPEN
        for leaf in list(_nodes_at(node, depth - len(node.path))):
            self._evaluate(interface, leaf)

    def _evaluate(self, interface: Interface, leaf: Node) -> None:
        """Give the verdict on an open bucket, if the slots allow one."""
        if leaf.state != OPEN:
            return
        order = interface.later if interface.loop is not None and leaf.number > 0 else interface.first
        group, failure = decide(interface.groups, order, leaf, interface.race)
        if group == WAIT:
            return
        if interface.loop is not None and not self._iterates(interface, leaf, group, failure):
            return
        if group == DEAD:
            self._close_unrun(interface, leaf, None)
        elif group == FAIL:
            assert failure is not None
            self._close_unrun(interface, leaf, failure)
        elif interface.ordered and leaf.parent is not None:
            leaf.verdict = group
            leaf.state = READY
            self._run_in_order(interface, leaf.parent)
        else:
            self._run(interface, leaf, group)

    def _iterates(self, interface: Interface, leaf: Node, group: int, failure: Failure | None) -> bool:
        """Whether this iteration exists; if not, or if it is the last that may, say the end of the loop."""
        assert interface.loop is not None
        parent, number = leaf.parent, leaf.number
        assert parent is not None
        exists = number == 0 or group >= 0
        if exists and number + 1 < interface.max_iters:
            return True
        count = number + 1 if exists else number
        parent.count, parent.torn = count, False if exists else (failure or False)
        if exists and group >= 0:
            self.stopped_by_max_iters += 1
        if not exists:
            assert parent.children is not None
            del parent.children[number]
        self._send_end(interface.loop, parent.path, count, parent.torn)
        if not exists:
            self._release(interface, parent)
        return exists

    def _run_in_order(self, interface: Interface, parent: Node) -> None:
        """`ordered`: run the ready activation whose lower numbers are all closed; after a failed one, fail it.

        A loop and not a recursion over the ones that fail: each closes the way for the next, and there may be many.
        """
        if parent.ordering:
            return
        parent.ordering = True
        while True:
            children = parent.children
            leaf = children.get(parent.low) if children else None
            if leaf is None or leaf.state != READY:
                break
            if parent.failed > leaf.number:
                self._run(interface, leaf, leaf.verdict)
                break
            path = self.plan.show(interface.scope, leaf.path)
            cause = "an earlier activation of this ordered stream failed"
            self._close_unrun(interface, leaf, Failure(interface.name, path, cause))
        parent.ordering = False

    def _run(self, interface: Interface, leaf: Node, group: int) -> None:
        leaf.state = RUNNING
        activation = leaf.activation = Activation(interface, leaf, group)
        self.running.add(activation)
        self.host.start(self, activation)

    def _close_unrun(self, interface: Interface, leaf: Node, failure: Failure | None) -> None:
        """Close a dead bucket (`failure` None) or a failed one, and say so."""
        cell: Cell = ABSENT if failure is None else failure
        if failure is not None and leaf.parent is not None and leaf.number < leaf.parent.failed:
            leaf.parent.failed = leaf.number
        leaf.state = RUNNING
        for output in interface.outputs:
            if output.source is None:
                self._send_fact(output.field, leaf.path, cell)
            else:
                self._send_end(output.source, leaf.path, 0, failure or False)
        self._finish(interface, leaf)

    def _finish(self, interface: Interface, node: Node) -> None:
        """Replace a closed bucket, and each prefix that is thereby done, by a tombstone, and acknowledge it."""
        while True:
            node.activation = None
            for source_id, account in (node.accounts or NO_ACCOUNTS).items():
                if account.open:
                    self.draining[source_id, node.path] = account
            parent = node.parent
            if parent is None:
                self._roots[interface.index] = TOMBSTONE
                return
            depth = len(node.path)
            parent.finish(node.number, self._elsewhere_of(interface, parent))
            source = interface.acks[depth - 1]
            if source is not None:
                self._send_ack(interface, source, parent.path, node.number)
            if interface.ordered and depth == len(interface.scope):
                self._run_in_order(interface, parent)
                if self._is_done(interface, parent):
                    return  # by the last of those that just failed
            if parent.count is None or parent.closed < self._mine(interface, parent):
                return
            node = parent

    def _release(self, interface: Interface, node: Node) -> None:
        """The end under `node` became known: if all its activations are closed, it is done."""
        if node.count is not None and node.closed >= self._mine(interface, node) and not self._is_done(interface, node):
            self._finish(interface, node)

    def _is_done(self, interface: Interface, node: Node) -> bool:
        if node.parent is None:
            return self._roots[interface.index] is TOMBSTONE
        return node.parent.is_done(node.number)

    def _elsewhere_of(self, interface: Interface, parent: Node) -> Callable[[int], bool] | None:
        """Which children of `parent` other shares own; None if all are here or all may have something here."""
        if not self._hashed or len(parent.path) + 1 != interface.route:
            return None
        shares, index, path = self.shares[interface.role], self.index, parent.path
        return lambda number: share_of((*path, number), shares) != index

    def _mine(self, interface: Interface, node: Node) -> int:
        """How many children of `node`, whose end is known, must be done here."""
        if node.mine < 0:
            assert node.count is not None
            elsewhere = self._elsewhere_of(interface, node)
            node.mine = node.count
            if elsewhere is not None:
                node.mine = sum(1 for number in range(node.count) if not elsewhere(number))
        return node.mine

    # ---- running activations --------------------------------------------------------------------------------

    def may_give(self, activation: Activation, output: int) -> bool:
        """Whether a stream output may create its next number now; if not, `Host.resume` will say when to ask again."""
        source = activation.interface.outputs[output].source
        return source is None or self._account(activation.node, source).may_create()

    def give(self, activation: Activation, output: int, value: Any, size: int = 0) -> None:
        """Say one value of an output (`value` is a payload of `size` bytes, or ABSENT).

        Raises:
            RoleError: a single output was given before, or the activation is over.
        """
        out = activation.interface.outputs[output]
        if activation.closed:
            raise RoleError(f"{activation.interface.name} gave {out.name!r} after its end")
        said = activation.given[output]
        activation.given[output] = said + 1
        path = activation.node.path
        if out.source is not None:
            path = (*path, self._account(activation.node, out.source).create(size))
        elif said:
            raise RoleError(f"{activation.interface.name} gave output {out.name!r} twice")
        self._send_fact(out.field, path, value)

    def finish(self, activation: Activation) -> None:
        """The activation returned: outputs not given are absent, streams end."""
        self._close(activation, ABSENT)

    def fail(self, activation: Activation, cause: str) -> None:
        """The activation raised: outputs not given fail, streams end torn; with on_error="absent" as `finish`."""
        interface = activation.interface
        if interface.spec.on_error == "absent":
            self._close(activation, ABSENT)
            return
        leaf = activation.node
        if leaf.parent is not None and leaf.number < leaf.parent.failed:
            leaf.parent.failed = leaf.number
        self._close(activation, Failure(interface.name, self.plan.show(interface.scope, leaf.path), cause))

    def _close(self, activation: Activation, rest: Cell) -> None:
        interface, leaf = activation.interface, activation.node
        activation.closed = True
        self.running.discard(activation)
        for output, said in zip(interface.outputs, activation.given, strict=True):
            if output.source is not None:
                self._send_end(output.source, leaf.path, said, False if rest is ABSENT else rest)
            elif not said:
                self._send_fact(output.field, leaf.path, rest)
        self._finish(interface, leaf)

    # ---- sending --------------------------------------------------------------------------------------------

    def _account(self, node: Node, source: int) -> Account:
        if node.accounts is None:
            node.accounts = {}
        account = node.accounts.get(source)
        if account is None:
            account = node.accounts[source] = account_for(
                self.plan, source, self.shares, self.credit, self.credit_bytes
            )
        return account

    def _send_fact(self, field_id: int, path: Path, cell: Cell) -> None:
        field = self.plan.fields[field_id]
        message: Message | None = None
        for route in field.routes:
            if message is None:
                message = fact(field_id, path, cell)
            for share in route.targets(path, self.shares[route.role]):
                self.host.send(route.role, share, message, route.interfaces)
        if field.to_gateway:
            self.host.to_gateway(message or fact(field_id, path, cell))

    def _send_end(self, source_id: int, parent: Path, count: int, torn: Torn) -> None:
        source = self.plan.sources[source_id]
        message = Message(END, source_id, parent, count, torn)
        for route in source.ends:
            for share in route.targets(parent, self.shares[route.role]):
                self.host.send(route.role, share, message, route.interfaces)
        if source.ends_to_gateway:
            self.host.to_gateway(message)

    def _send_ack(self, interface: Interface, source_id: int, parent: Path, number: int) -> None:
        source = self.plan.sources[source_id]
        message = Message(ACK, source_id, parent, number, (interface.id, self.index))
        if source.creator == GATEWAY:
            self.host.to_gateway(message)
            return
        creator = self.plan.interfaces[source.creator]
        share = share_of(parent[: creator.route], self.shares[creator.role])
        self.host.send(creator.role, share, message, (creator.id,))

    # ---- the end --------------------------------------------------------------------------------------------

    def close(self) -> list[Activation]:
        """The request is over: forget everything. Returns the activations that still run, for the host to cancel."""
        running = list(self.running)
        for activation in running:
            activation.closed = True
        self.running.clear()
        self.draining.clear()
        for root in self._roots:
            if root is not None and root is not TOMBSTONE:
                for node in list(_all_nodes(root)):
                    node.parent = node.children = node.activation = None
                    node.above = ()
        self._roots = [TOMBSTONE] * len(self._roots)
        return running

    def census(self) -> Mapping[str, int]:
        """What is left: open nodes, running activations, open numbers, interfaces touched that are no tombstone."""
        nodes = [n for root in self._roots if root is not None and root is not TOMBSTONE for n in _all_nodes(root)]
        open_numbers = sum(a.open for n in nodes for a in (n.accounts or {}).values())
        return {
            "nodes": len(nodes),
            "running": len(self.running),
            "open_numbers": open_numbers + sum(a.open for a in self.draining.values()),
            "untouched": sum(root is None for root in self._roots),
        }


def account_for(plan: Plan, source_id: int, shares: Sequence[int], credit: int, credit_bytes: int) -> Account:
    """A fresh account of a source: W raised so that windows can fill, acks expected from each reader waited for."""
    source = plan.sources[source_id]
    expected = sum(shares[r.role] if r.everyone else 1 for r in source.readers)
    return Account(max(credit, source.at_least), expected, credit_bytes, source.at_least)


def _nodes_at(node: Node, depth: int) -> Iterator[Node]:
    """The known nodes `depth` levels below `node`."""
    if depth == 0:
        yield node
    elif node.children:
        for child in list(node.children.values()):
            yield from _nodes_at(child, depth - 1)


def _all_nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in (node.children or {}).values():
        yield from _all_nodes(child)
