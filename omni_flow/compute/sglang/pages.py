"""The engine's own book of KV pages: what it leases, writes, has sealed and pinned. Pure: no torch, no sglang.

Pages come from a `PageSource` (pagesource.py: the memory manager, or this process alone). The book keeps the equation
that SGLang's leak check verifies when idle:

    quota = available + held + pinned      held: leased pages with content that is not sealed
                                           pinned: sealed pages, idle or locked by requests

An idle pin is SGLang's "evictable", a locked one its "protected". The source promises the quota, so `take` within
`available` cannot fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from itertools import islice
from typing import Final, NamedTuple, Protocol

from omni_flow.compute.errors import ComputeError
from omni_flow.data.identity import PageHash

LOT: Final = 64
Fence = Callable[[], Callable[[], bool]]
"""Marks the work launched so far; the result says whether the device has finished it."""


class PageSource(Protocol):
    """Who owns the pages. `quota` pages can always be had: leased, or pinned through `seal` and `find`, together.
    `forced` counts leases for which cached pages were dropped that should have been written down."""

    quota: int
    forced: int

    def take(self, count: int, least: int) -> list[int]:
        """Lease `count` pages, or fewer but at least `least`; nobody else gets them."""

    def give(self, pages: Sequence[int]) -> None:
        """Return leased pages. The device has finished with them."""

    def seal(self, pages: Sequence[int], keys: Sequence[PageHash]) -> Callable[[], list[int]]:
        """Publish leased pages under their keys, which are distinct, and pin them. Others find them once what this
        returns has been called.

        That gives per key the page that holds it now. Where it is another than the given one the key was there already:
        that page is pinned and the given one stays leased.
        """

    def known(self, keys: Sequence[PageHash]) -> int:
        """How many pages `find` would find now."""

    def absent(self, keys: Sequence[PageHash]) -> Callable[[], set[PageHash]]:
        """Those of `keys`, of whatever sequences, that `find` would not find now."""

    def find(self, keys: Sequence[PageHash]) -> list[int]:
        """The pages of the longest prefix of `keys` that is there, pinned."""

    def unpin(self, pages: Sequence[int]) -> None:
        """Give one pin of each page back."""


class Node:
    """A sealed page that this engine has pinned, at its place in the chain. The root stands for the empty prefix."""

    __slots__ = ("children", "depth", "key", "locks", "page", "parent")

    def __init__(self, key: PageHash | None, page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.children: dict[PageHash, Node] = {}
        self.locks = 0

    def chain(self) -> list[int]:
        """The pages from the first of the sequence to this one."""
        pages: list[int] = []
        node = self
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages


class Part(NamedTuple):
    """Pages of one sequence to be sealed: the first `len(keys)` pages of `own`, which follow `node`."""

    node: Node
    keys: Sequence[PageHash]
    own: list[int]


class Sealed(NamedTuple):
    """What sealing made of a sequence.

    Args:
        node: the end of its sealed part.
        replaced: (page number in the sequence, page that holds it now) where an equal page existed already.
    """

    node: Node
    replaced: list[tuple[int, int]]


class PageBook:
    """See the module. `fence` marks the device's progress: pages go back to others only when it has passed."""

    def __init__(self, source: PageSource, fence: Fence | None = None) -> None:
        self.source = source
        self.fence = fence
        self.held = 0
        self.pinned = 0
        self.locked = 0
        self.root = Node(None, 0, None)
        self._lease: list[int] = []
        self._leaving: deque[tuple[Callable[[], bool], list[int]]] = deque()
        self._idle: dict[Node, None] = {}

    @property
    def available(self) -> int:
        """Pages that can be taken without evicting."""
        return self.source.quota - self.held - self.pinned

    @property
    def idle(self) -> int:
        """Pinned pages that no request uses."""
        return len(self._idle)

    @property
    def leased(self) -> int:
        """Leased pages without content, on their way out included."""
        return len(self._lease) + sum(len(pages) for _, pages in self._leaving)

    # -- leased pages -------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Take `count` pages to write.

        Raises:
            ComputeError: beyond the quota, which the scheduler must have checked.
        """
        if count > self.available:
            raise ComputeError(
                f"{count} pages wanted, {self.available} of {self.source.quota} available", "evict first"
            )
        self._settle()
        while len(self._lease) < count and self._leaving:
            self._lease[:0] = self._leaving.pop()[1]
        short = count - len(self._lease)
        if short > 0:
            room = self.available - self.leased
            self._lease[:0] = self.source.take(max(short, min(LOT, room)), short)[::-1]
        taken = [self._lease.pop() for _ in range(count)]
        self.held += count
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Give taken pages back. They are reused in this engine at once (launched work is in order), and by others
        when more than two lots have gathered and the device has passed."""
        self.held -= len(pages)
        self._lease.extend(pages)
        if len(self._lease) > 2 * LOT:
            self._leave(self._lease[:-LOT])
        self._settle()

    def _leave(self, first: list[int]) -> None:
        """The first of the lease go back, once the device has passed."""
        del self._lease[: len(first)]
        if self.fence is None:
            self.source.give(first)
        elif first:
            self._leaving.append((self.fence(), first))

    def _settle(self) -> None:
        while self._leaving and self._leaving[0][0]():
            self.source.give(self._leaving.popleft()[1])

    # -- sealed pages -------------------------------------------------------------------------------------------

    def first_unpinned(self, keys: Sequence[PageHash]) -> PageHash | None:
        """The first of `keys` that `match` would ask the source for."""
        node = self.root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                return key
            node = child
        return None

    def match(self, keys: Sequence[PageHash], absent: Set[PageHash] = frozenset()) -> Node:
        """The end of the longest prefix of `keys` that is there; what was not pinned before is pinned now and idle.

        Args:
            absent: keys which the source is known not to have.
        """
        node = self.root
        for at, key in enumerate(keys):
            child = node.children.get(key)
            if child is None:
                if key not in absent:
                    rest = keys[at:]
                    for found, page in zip(rest, self._find(node, rest), strict=False):
                        node = self._add(node, found, page)
                break
            node = child
        self._touch(node)
        return node

    def _find(self, node: Node, keys: Sequence[PageHash]) -> list[int]:
        """Pages of the source that follow `node`; leased pages without content and idle pins on others make room."""
        room = self.available - self.leased
        if room < len(keys) and (self._lease or self._idle):
            self.make_room(self.source.known(keys), node)
            room = self.available - self.leased
        return self.source.find(keys[:room]) if room > 0 else []

    def make_room(self, count: int, node: Node) -> None:
        """See that `count` pages of the source, which follow `node`, can be pinned: leased pages without content make
        room where they alone suffice, else idle pins on others, for the next batch would wait for another lease."""
        short = count - self.available + self.leased
        if short > len(self._lease):
            self.lock(node)
            short -= self.evict(short)
            self.unlock(node)
        if short > 0:
            self._leave(self._lease[:short])

    def seal(self, *parts: Part) -> Callable[[], list[Sealed]]:
        """Publish pages of several sequences with one call of the source; they leave their `own`.

        A page whose key exists already is replaced by the existing one and goes back to the lease: two copies of one
        page are not bit-equal, and every engine must read the same.

        Returns:
            waits until others can find them and says what became of each part. Call it before anything else is done
            with the book.
        """
        taken: list[list[int]] = []
        fresh: dict[PageHash, int] = {}
        for node, keys, own in parts:
            pages = own[: len(keys)]
            del own[: len(keys)]
            taken.append(pages)
            there: Node | None = node
            for key, page in zip(keys, pages, strict=True):
                there = there.children.get(key) if there is not None else None
                if there is None:
                    fresh.setdefault(key, page)
        answer = self.source.seal(list(fresh.values()), list(fresh)) if fresh else None

        def finish() -> list[Sealed]:
            where = dict(zip(fresh, answer(), strict=True)) if answer is not None else {}
            return [self._sealed(part.node, part.keys, pages, where) for part, pages in zip(parts, taken, strict=True)]

        return finish

    def _sealed(self, node: Node, keys: Sequence[PageHash], pages: list[int], where: dict[PageHash, int]) -> Sealed:
        """Enter one sequence of which `pages` were to be sealed and each key is in the tree or in `where`."""
        replaced: list[tuple[int, int]] = []
        spare: list[int] = []
        for key, mine in zip(keys, pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, where[key])
                self.held -= child.page == mine
            if child.page != mine:
                replaced.append((node.depth, child.page))
                spare.append(mine)
            node = child
        self._touch(node)
        self.give(spare)
        return Sealed(node, replaced)

    def lock(self, node: Node) -> None:
        """A request uses the chain up to `node`."""
        while node.parent is not None:
            if node.locks == 0:
                del self._idle[node]
                self.locked += 1
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """A request no longer uses the chain up to `node`."""
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self._idle[node] = None
                self.locked -= 1
            node = node.parent

    def evict(self, count: int) -> int:
        """Unpin `count` idle pages, least recently used chains first, each from its end; returns how many there were.

        They stay in the pool for whoever finds them; what is dropped from memory is the manager's decision.
        """
        gone: list[int] = []
        for node in list(islice(self._idle, count)):
            self._drop(node)
            gone.append(node.page)
        if gone:
            self.source.unpin(gone)
        return len(gone)

    def let_go(self, keys: Sequence[PageHash]) -> int:
        """Unpin what no request uses of this chain, from its end on; pages that other chains go on from stay.

        Returns how many there were.
        """
        node = self.root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            node = child
        gone: list[int] = []
        while node.parent is not None and not node.children and not node.locks:
            self._drop(node)
            gone.append(node.page)
            node = node.parent
        if gone:
            self.source.unpin(gone)
        return len(gone)

    def reset(self) -> None:
        """Unpin everything. No request may be running."""
        self.evict(len(self._idle))
        if self.pinned:
            raise ComputeError(f"{self.pinned} pages are still in use", "wait until no request runs")

    def check(self) -> list[str]:
        """Violated invariants; empty when sound."""
        nodes: list[Node] = []
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            nodes.append(node)
            todo.extend(node.children.values())
        wrong = []
        if len(nodes) != self.pinned:
            wrong.append(f"{len(nodes)} nodes, {self.pinned} pinned")
        if sum(node.locks > 0 for node in nodes) != self.locked or self.locked + len(self._idle) != self.pinned:
            wrong.append(f"{self.locked} locked and {len(self._idle)} idle of {self.pinned} pinned")
        if len({node.page for node in nodes}) != len(nodes) or {node.page for node in nodes} & set(self._lease):
            wrong.append("a page stands in two places")
        order = {node: at for at, node in enumerate(self._idle)}
        if any(order.get(child, -1) > at for node, at in order.items() for child in node.children.values()):
            wrong.append("an idle page would go before one that follows it")
        if self.available < 0:
            wrong.append(f"{self.held} held and {self.pinned} pinned of {self.source.quota}")
        return wrong

    def _add(self, parent: Node, key: PageHash, page: int) -> Node:
        node = parent.children[key] = Node(key, page, parent)
        self.pinned += 1
        self._idle[node] = None
        return node

    def _touch(self, node: Node) -> None:
        """The chain up to `node` was used. Its end comes first, here as in `unlock`: so in the order of `_idle` a page
        stands before those it follows, and what `evict` takes from the front has no children."""
        while node.parent is not None:
            if node.locks == 0:
                del self._idle[node]
                self._idle[node] = None
            node = node.parent

    def _drop(self, leaf: Node) -> None:
        del self._idle[leaf]
        assert not leaf.children
        assert leaf.parent is not None
        assert leaf.key is not None
        del leaf.parent.children[leaf.key]
        self.pinned -= 1
