"""The trees of prefixes of one share: which prefixes there are, which are done, and which are another share's.

The lowest layer of `Share`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from omni_flow.control.buckets import Node
from omni_flow.control.plan import Interface, Path, RolePlan, share_of

TOMBSTONE: Final = Node(None, 0, 0)
"""Stands for an interface all of whose activations on this share are closed."""


class Trees:
    """One tree for each interface of `role`, on share `index`. `shares[r]` is the number of shares of role r."""

    __slots__ = ("_hashed", "_roots", "index", "interfaces", "role", "shares")

    def __init__(self, role: RolePlan, index: int, shares: Sequence[int]) -> None:
        self.role = role
        self.index = index
        self.shares = shares
        self.interfaces = role.members
        self._roots: list[Node | None] = [None] * len(role.members)
        self._hashed = shares[role.id] > 1

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

    def _is_done(self, interface: Interface, node: Node) -> bool:
        """Whether a tombstone stands for `node`."""
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

    def _nodes(self) -> Iterator[Node]:
        """All nodes that are open."""
        for root in self._roots:
            if root is not None and root is not TOMBSTONE:
                yield from _all_nodes(root)

    def _untouched(self) -> int:
        """How many interfaces nothing was heard of."""
        return sum(root is None for root in self._roots)

    def _clear(self) -> None:
        """Forget everything: all is done now."""
        for root in self._roots:
            if root is not None and root is not TOMBSTONE:
                for node in list(_all_nodes(root)):
                    node.parent = node.children = node.activation = None
                    node.above = ()
        self._roots = [TOMBSTONE] * len(self._roots)


def nodes_at(node: Node, depth: int) -> Iterator[Node]:
    """The known nodes `depth` levels below `node`."""
    if depth == 0:
        yield node
    elif node.children:
        for child in list(node.children.values()):
            yield from nodes_at(child, depth - 1)


def _all_nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in (node.children or {}).values():
        yield from _all_nodes(child)
