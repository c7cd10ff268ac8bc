"""The spool rule: which readers a creator of numbers must not wait for.

A creator waits until each reader has released a number. A reader that can only go on when the creator itself goes on
would make that a circle; such a pair (reader, source) is *spooled*: not waited for. The rule is a reachability
question on a small static graph, decided here once at compile time.

Nodes: an interface's run, ("+", s) the birth of numbers of a window or streamed placeholder s, ("end", w) the last
window of w. Numbers of a stream output are born in the run of its interface; loops have no birth, max_iters bounds
them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from omni_flow.control.scopes import CLOSING, Names, Scopes, slots_of, window_source
from omni_flow.control.spec import FieldRef, Join, SlotSpec

Node = tuple[str, str]


class Reader(NamedTuple):
    """Who reads under a source: an interface, or (`interface` None) the client through graph output `output`."""

    interface: str | None
    output: str | None


def readers_of(scopes: Scopes, source: str) -> list[Reader]:
    """All who could be waited for by the creator of `source`: those under it, its windows, the client."""
    found = []
    for interface in scopes.spec.interfaces:
        scope = scopes.interfaces.get(interface.name)
        if scope is None:
            continue
        windows = any(s.join is Join.WINDOW and scopes.closed(s) == (source,) for s in slots_of(interface))
        if source in scope or windows:
            found.append(Reader(interface.name, None))
    for name, slot in scopes.spec.outputs.items():
        if source in (scopes.slot_scope(None, slot) or ()):
            found.append(Reader(None, name))
    return found


def spooled(scopes: Scopes) -> set[tuple[Reader, str]]:
    """The pairs (reader, source) that are not waited for."""
    sources = sorted({s for scope in scopes.fields.values() for s in scope} | _windows(scopes))
    edges: dict[Node, set[Node]] = defaultdict(set)
    waits: dict[tuple[Reader, str], set[Node]] = {}
    for interface in scopes.spec.interfaces:
        scope = scopes.interfaces.get(interface.name)
        if scope is None:
            continue
        edges["run", interface.name] |= _back(scopes, list(slots_of(interface)), scope)
        if window_source(interface.name) in scope:
            edges["end", window_source(interface.name)] |= _back(scopes, list(slots_of(interface)), ())
    for source in sources:
        born = _birth(scopes, source)
        if born is None:
            continue
        for reader in readers_of(scopes, source):
            wait = _wait(scopes, reader, source)
            waits[reader, source] = wait
            edges[born] |= wait
            if reader.interface is not None:
                edges[born].add(("run", reader.interface))
    found = set()
    for (reader, source), wait in waits.items():
        born = _birth(scopes, source)
        if any(born in _reachable(edges, node) for node in wait):
            found.add((reader, source))
    return found


def _windows(scopes: Scopes) -> set[str]:
    return {window_source(name) for name, scope in scopes.interfaces.items() if window_source(name) in scope}


def _birth(scopes: Scopes, source: str) -> Node | None:
    """Where numbers of `source` are born; None for a loop."""
    if source.endswith("@loop"):
        return None
    if source.endswith("@win"):
        return ("+", source)
    producer = scopes.producer.get(source)
    return ("run", producer.name) if producer is not None else ("+", source)


def _wait(scopes: Scopes, reader: Reader, source: str) -> set[Node]:
    """What must still happen before `reader` releases a number of `source`."""
    if reader.interface is None:
        assert reader.output is not None
        slot = scopes.spec.outputs[reader.output]
        scope = scopes.slot_scope(None, slot) or ()
        return _back(scopes, [slot], scope[: scope.index(source) + 1])
    interface = scopes.by_name[reader.interface]
    scope = scopes.interfaces[interface.name]
    own_window = window_source(interface.name)
    if source in scope:
        running = scope[: scope.index(source) + 1]
    else:
        running = next(
            scopes.fields[scopes.target(s) or ""] for s in slots_of(interface) if scopes.closed(s) == (source,)
        )
    wait = _back(scopes, list(slots_of(interface)), running)
    if own_window in scope:
        wait.add(("+", own_window))
    return wait


def _back(scopes: Scopes, slots: list[SlotSpec], running: Names) -> set[Node]:
    """What `slots` depend on, with the sources of `running` already running."""
    found: set[Node] = set()
    visited: set[str] = set()
    owner_of = {id(s): i for i in scopes.spec.interfaces for s in slots_of(i)}
    queue = list(slots)
    while queue:
        slot = queue.pop()
        owner = owner_of.get(id(slot))
        closed = scopes.closed(slot)
        if slot.join is Join.WINDOW:
            if owner is not None and window_source(owner.name) in running:
                continue
            closed = tuple(s for s in closed if s not in running)
        for source in closed:
            born = _birth(scopes, source)
            if born is not None:
                found.add(born)
            if source.endswith("@win"):
                found.add(("end", source))
        names = [scopes.target(slot)]
        if slot.join is Join.COUNT and isinstance(slot.n, FieldRef):
            names.append(slot.n.name)
        for name in names:
            if name is None or name not in scopes.producer:
                continue
            if name in running and scopes.is_stream(name) and not (slot.join in CLOSING and name == names[0]):
                continue
            producer = scopes.producer[name]
            if producer is None:
                if scopes.is_stream(name):
                    found.add(("+", name))
                continue
            found.add(("run", producer.name))
            if producer.name not in visited:
                visited.add(producer.name)
                queue += slots_of(producer)
    return found


def _reachable(edges: dict[Node, set[Node]], start: Node) -> set[Node]:
    seen = {start}
    stack = [start]
    while stack:
        for node in edges.get(stack.pop(), ()):
            if node not in seen:
                seen.add(node)
                stack.append(node)
    return seen
