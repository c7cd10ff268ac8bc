"""The activations of one share: from an open bucket to its tombstone. The middle layer of `Share`.

A bucket is judged whenever one of its slots becomes known; what runs gives outputs; what is over becomes a tombstone,
with each prefix that is thereby done, and is acknowledged. Nothing here knows how slots are filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omni_flow.control.buckets import DEAD, FAIL, OPEN, READY, RUNNING, WAIT, Node, decide
from omni_flow.control.credit import UNBOUNDED, Account, account_for
from omni_flow.control.facts import ABSENT, ACK, END, Cell, Failure, Message, Torn, fact
from omni_flow.control.host import Activation, Host, RoleError
from omni_flow.control.plan import GATEWAY, Interface, Path, Plan, RolePlan, Slot, share_of
from omni_flow.control.trees import TOMBSTONE, Trees, nodes_at

NO_ACCOUNTS: Final[Mapping[int, Account]] = {}


class Activations(Trees):
    """Those of share `index` of `role` in one request.

    `params` is the request's snapshot, `credit` W in numbers and `credit_bytes` in bytes per parent. `dropped` counts
    the messages that came again or for what is done.
    """

    __slots__ = ("credit", "credit_bytes", "draining", "dropped", "host", "params", "plan", "running",
                 "stopped_by_max_iters")  # fmt: skip

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
        super().__init__(role, index, shares)
        self.plan = plan
        self.params = params
        self.host = host
        self.credit = plan.credit if credit is None else credit
        self.credit_bytes = credit_bytes
        self.running: set[Activation] = set()
        self.draining: dict[tuple[int, Path], Account] = {}
        self.dropped = 0
        self.stopped_by_max_iters = 0

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
        for leaf in list(nodes_at(node, depth - len(node.path))):
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
