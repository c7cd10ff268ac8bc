"""The right answer: a sequential interpreter of a graph.

No message, bucket, share or clock: every fact is computed on demand from the facts it depends on and remembered. It is
written from the semantics alone and shares nothing with the compiler but the neutral form, so that it can judge it.
`scopes.py` has what follows from the graph alone.

Facts are `(kind, value)`: one of `VALUE`, `ABSENT_FACT`, `FAILED_FACT` for each field and existing path. An end is
`(count, torn)` for each source and parent path. Loop sources are `H@loop`, window sources `I@win`, stream sources the
field itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from omni_flow.control.spec import FieldRef, GraphSpec, InterfaceSpec, Join, ParamRef, SlotSpec
from omni_flow.refs import ABSENT
from omni_flow.testing.cutting import Cuts, InvalidChoiceError, cut
from omni_flow.testing.facts import (
    ABSENT_FACT,
    FAILED_FACT,
    Activation,
    Behave,
    Delivered,
    End,
    Fact,
    Path,
    Result,
    Run,
    Scope,
    show_path,
)
from omni_flow.testing.scopes import Scopes

Verdict = Literal["ready", "failed", "dead"]


def interpret(
    spec: GraphSpec,
    inputs: Mapping[str, Any],
    params: Mapping[str, Any] | None,
    behave: Behave,
    choices: Mapping[tuple[str, Path], int] | None = None,
    cuts: Mapping[tuple[str, Path], Cuts] | None = None,
) -> Result:
    """The result of one request on a graph that is free of lint errors.

    Args:
        inputs: placeholder → value; a sequence for a streamed one; None or missing: not sent.
        params: overrides of the graph's parameters.
        behave: what each role does; called once per activation, in number order for ordered interfaces.
        choices: for interfaces with `race`, the group that won; the first ready group where nothing is said.
        cuts: for windows of a policy that looks at a clock, by window source and parent, where the clock cut them;
            as large as may be where nothing is said.

    Raises:
        InvalidChoiceError: a group that is said to have won is not ready, or windows can't have been cut like that.
    """
    return _Interpreter(spec, inputs, params or {}, behave, choices or {}, cuts or {}).result()


@dataclass(slots=True)
class _Closed:
    """An activation after it ran or was found dead or failed. `failed` as `ordered` means it."""

    singles: dict[str, Fact] = field(default_factory=dict)
    streams: dict[str, list[Fact]] = field(default_factory=dict)
    torn: bool = False
    failed: bool = False


class _Interpreter:
    def __init__(
        self,
        spec: GraphSpec,
        inputs: Mapping[str, Any],
        params: Mapping[str, Any],
        behave: Behave,
        choices: Mapping[tuple[str, Path], int],
        cuts: Mapping[tuple[str, Path], Cuts],
    ) -> None:
        self.spec = spec
        self.inputs = inputs
        self.params = {param.name: param.default for param in spec.params} | dict(params)
        self.behave = behave
        self.choices = choices
        self.cuts = cuts
        self.scopes = Scopes(spec)
        self.placeholders, self.producers = self.scopes.placeholders, self.scopes.producers
        self.heads, self.windowing = self.scopes.heads, self.scopes.windowing
        self.is_ordered = {
            interface.name: any(slot.ordered for group in interface.groups for slot in group)
            for interface in spec.interfaces
        }
        self.facts: dict[tuple[str, Path], Fact] = {}
        self.ends: dict[tuple[str, Path], End] = {}
        self.verdicts: dict[tuple[str, Path], tuple[Verdict, int, dict[str, Any]]] = {}
        self.closed: dict[tuple[str, Path], _Closed] = {}
        self.windows: dict[tuple[str, Path], tuple[list[list[Any]], bool]] = {}
        self.broken: set[tuple[str, Path]] = set()
        self.runs: dict[tuple[str, Path], Run] = {}
        self.start_order: dict[str, list[Path]] = {}

    def result(self) -> Result:
        for interface in self.spec.interfaces:
            for path in self.paths(self.scopes.interface(interface.name)):
                self.activation(interface, path)
        for name in [*self.placeholders, *self.producers]:
            for path in self.paths(self.scopes.field(name)):
                self.fact(name, path)
        outputs = {name: self.deliver(slot) for name, slot in self.spec.outputs.items()}
        hidden = {i.name: self.deliver_hidden(i) for i in self.spec.interfaces if not i.outputs}
        failed = any(delivered.failed for delivered in [*outputs.values(), *hidden.values()])
        return Result(
            outputs, hidden, "failed" if failed else "done", self.runs, self.facts, self.ends, self.start_order
        )

    # Facts and ends

    def paths(self, scope: Scope, prefix: Path = ()) -> Iterator[Path]:
        """All existing paths of a scope below a prefix, in path order."""
        if len(prefix) == len(scope):
            yield prefix
            return
        source = scope[len(prefix)]
        for number in range(self.end(source, prefix)[0]):
            yield from self.paths(scope, (*prefix, (source, number)))

    def fact(self, name: str, path: Path) -> Fact:
        key = (name, path)
        fact = self.facts.get(key)
        if fact is None:
            fact = self.facts[key] = self._fact(name, path)
        return fact

    def _fact(self, name: str, path: Path) -> Fact:
        placeholder = self.placeholders.get(name)
        if placeholder is not None:
            value = self.inputs.get(name)
            if placeholder.stream:
                return Fact("value", value[path[-1][1]])  # type: ignore[index]
            return ABSENT_FACT if value is None else Fact("value", value)
        interface, output = self.producers[name]
        if output.stream:
            return self.activation(interface, path[:-1]).streams[name][path[-1][1]]
        return self.activation(interface, path).singles[name]

    def end(self, source: str, parent: Path) -> End:
        key = (source, parent)
        end = self.ends.get(key)
        if end is None:
            end = self.ends[key] = self._end(source, parent)
        return end

    def _end(self, source: str, parent: Path) -> End:
        if source in self.heads:
            return self.loop_end(self.heads[source], parent)
        if source in self.windowing:
            windows, torn = self.cut_windows(source, parent)
            return len(windows), torn
        if source in self.placeholders:
            sent = self.inputs.get(source)
            return (0 if sent is None else len(sent)), False
        interface, _ = self.producers[source]
        closed = self.activation(interface, parent)
        return len(closed.streams[source]), closed.torn

    def frames(self, name: str, sources: Scope, prefix: Path) -> Iterator[Fact]:
        """The facts of a field under a prefix in path order; a torn end is a failure at its place."""
        if not sources:
            yield self.fact(name, prefix)
            return
        count, torn = self.end(sources[0], prefix)
        for number in range(count):
            yield from self.frames(name, sources[1:], (*prefix, (sources[0], number)))
        if torn:
            yield FAILED_FACT

    # Joins

    def slot_fact(self, interface: InterfaceSpec | None, slot: SlotSpec, path: Path) -> Fact:
        """What a slot resolves to for the activation at `path`."""
        if slot.field in self.spec.feedback:
            bound = self.spec.feedback[slot.field]
            assert bound is not None, "a bound feedback is a lint matter"
            source, iteration = path[-1]
            return self.fact(bound, (*path[:-1], (source, iteration - 1)))
        scope = self.scopes.field(slot.field)
        if slot.join is Join.PLAIN:
            return self.fact(slot.field, path[: len(scope)])
        if slot.join is Join.WINDOW:
            prefix = path[: len(scope)]
            source, number = prefix[-1]
            return Fact("value", self.cut_windows(source, prefix[:-1])[0][number])
        depth = self.scopes.depth(slot, scope)
        frames = self.frames(slot.field, scope[depth:], path[:depth])
        if slot.join is Join.COUNT and slot.n != "all":
            return self.count(slot, frames, path[:depth])
        values = []
        for fact in frames:
            if fact.kind == "failed":
                return FAILED_FACT
            if fact.kind == "value":
                values.append(fact.value)
        if not values:
            return ABSENT_FACT
        return Fact("value", values[-1] if slot.join is Join.LAST else values)

    def count(self, slot: SlotSpec, frames: Iterator[Fact], prefix: Path) -> Fact:
        n: Any = slot.n
        if isinstance(n, ParamRef):
            n = self.params[n.name]
        elif isinstance(n, FieldRef):
            fact = self.fact(n.name, prefix[: len(self.scopes.field(n.name))])
            if fact.kind != "value":
                return fact
            n = fact.value
        if not isinstance(n, int) or isinstance(n, bool):
            return FAILED_FACT
        if n <= 0:
            return ABSENT_FACT
        values = []
        for fact in frames:
            if fact.kind == "failed":
                return FAILED_FACT
            if fact.kind == "value":
                values.append(fact.value)
                if len(values) == n:
                    return Fact("value", values)
        return ABSENT_FACT

    def cut_windows(self, source: str, parent: Path) -> tuple[list[list[Any]], bool]:
        key = (source, parent)
        known = self.windows.get(key)
        if known is None:
            _, slot = self.windowing[source]
            frames: list[Any] = []
            torn = False
            for fact in self.frames(slot.field, self.scopes.field(slot.field)[-1:], parent):
                if fact.kind == "failed":
                    torn = True
                    break
                if fact.kind == "value":
                    frames.append(fact.value)
            cuts = cut(slot, frames, torn, self.cuts.get(key, Cuts()))
            known = self.windows[key] = ([frames[a:b] for a, b in cuts], torn)
        return known

    # Activations

    def verdict(self, interface: InterfaceSpec, path: Path) -> tuple[Verdict, int, dict[str, Any]]:
        """Which group decides the activation, how, and with which inputs."""
        key = (interface.name, path)
        known = self.verdicts.get(key)
        if known is None:
            known = self.verdicts[key] = self._verdict(interface, path)
        return known

    def _verdict(self, interface: InterfaceSpec, path: Path) -> tuple[Verdict, int, dict[str, Any]]:
        applying = range(len(interface.groups))
        if f"{interface.name}@loop" in self.heads:
            later = path[-1][1] > 0
            applying = [i for i in applying if later == any(s.field in self.spec.feedback for s in interface.groups[i])]  # type: ignore[assignment]
        decided: dict[int, tuple[Verdict, int, dict[str, Any]]] = {}
        for index in applying:
            verdict, inputs = self.group_verdict(interface, interface.groups[index], path)
            if verdict != "dead":
                if not interface.race:
                    return verdict, index, inputs
                decided[index] = (verdict, index, inputs)
        ready = [index for index, found in decided.items() if found[0] == "ready"]
        chosen = self.choices.get((interface.name, path))
        if chosen is not None and chosen not in ready:
            raise InvalidChoiceError(f"{interface.name} at {show_path(path)!r}: group {chosen} is not ready")
        if ready:
            return decided[ready[0] if chosen is None else chosen]
        if decided:
            return next(iter(decided.values()))
        return "dead", -1, {}

    def group_verdict(
        self, interface: InterfaceSpec, group: Sequence[SlotSpec], path: Path
    ) -> tuple[Verdict, dict[str, Any]]:
        facts = [(slot, self.slot_fact(interface, slot, path)) for slot in group]
        if any(fact.kind == "absent" and not slot.optional for slot, fact in facts):
            return "dead", {}
        if all(fact.kind == "absent" for _, fact in facts):
            return "dead", {}
        if any(fact.kind == "failed" for _, fact in facts):
            return "failed", {}
        return "ready", {slot.param: fact.value for slot, fact in facts if fact.kind == "value"}

    def loop_end(self, head: InterfaceSpec, base: Path) -> End:
        assert head.max_iters is not None, "a head without max_iters is a lint matter"
        source = f"{head.name}@loop"
        for iteration in range(1, head.max_iters):
            verdict, _, _ = self.verdict(head, (*base, (source, iteration)))
            if verdict != "ready":
                return iteration, verdict == "failed"
        return head.max_iters, False

    def activation(self, interface: InterfaceSpec, path: Path) -> _Closed:
        key = (interface.name, path)
        closed = self.closed.get(key)
        if closed is None:
            if self.is_ordered[interface.name]:
                source, number = path[-1]
                for lower in range(number):
                    if (interface.name, (*path[:-1], (source, lower))) not in self.closed:
                        self.activation(interface, (*path[:-1], (source, lower)))
            closed = self.closed[key] = self._activation(interface, path)
        return closed

    def _activation(self, interface: InterfaceSpec, path: Path) -> _Closed:
        verdict, group, inputs = self.verdict(interface, path)
        parent = (interface.name, path[:-1])
        if verdict == "ready" and self.is_ordered[interface.name] and parent in self.broken:
            verdict = "failed"
        if verdict != "ready":
            failed = verdict == "failed"
            closed = _Closed(torn=failed, failed=failed)
            for output in interface.outputs:
                if output.stream:
                    closed.streams[output.field] = []
                else:
                    closed.singles[output.field] = FAILED_FACT if failed else ABSENT_FACT
        else:
            closed = self.run(interface, path, group, inputs)
        if closed.failed:
            self.broken.add(parent)
        return closed

    def run(self, interface: InterfaceSpec, path: Path, group: int, inputs: dict[str, Any]) -> _Closed:
        self.runs[interface.name, path] = Run(group, inputs)
        self.start_order.setdefault(interface.name, []).append(path)
        given = self.behave(self.describe(interface, path, group, inputs))
        fields = {output.name: output for output in interface.outputs}
        closed = _Closed(streams={output.field: [] for output in interface.outputs if output.stream})
        raised = given.raises
        for name, value in given.gives:
            output = fields.get(name)
            if output is None or output.field in closed.singles:
                raised = True
                break
            fact = ABSENT_FACT if value is ABSENT else Fact("value", value)
            if output.stream:
                closed.streams[output.field].append(fact)
            else:
                closed.singles[output.field] = fact
        closed.failed = closed.torn = raised and interface.on_error == "fail"
        for output in interface.outputs:
            if not output.stream:
                closed.singles.setdefault(output.field, FAILED_FACT if closed.failed else ABSENT_FACT)
        return closed

    def describe(self, interface: InterfaceSpec, path: Path, group: int, inputs: dict[str, Any]) -> Activation:
        for source, number in reversed(path):
            head = self.heads.get(source)
            if head is not None and head.max_iters is not None:
                last = number + 1 >= head.max_iters
                return Activation(interface.name, path, group, inputs, self.params, number, last)
        return Activation(interface.name, path, group, inputs, self.params)

    # The client

    def deliver(self, slot: SlotSpec) -> Delivered:
        scope = self.scopes.slot(None, slot)
        return self._deliver(lambda path: self.slot_fact(None, slot, path), scope)

    def deliver_hidden(self, interface: InterfaceSpec) -> Delivered:
        def hidden(path: Path) -> Fact:
            return FAILED_FACT if self.activation(interface, path).failed else ABSENT_FACT

        return self._deliver(hidden, self.scopes.interface(interface.name))

    def _deliver(self, fact_at: Callable[[Path], Fact], scope: Scope) -> Delivered:
        def walk(prefix: Path) -> Iterator[Fact]:
            if len(prefix) == len(scope):
                yield fact_at(prefix)
                return
            source = scope[len(prefix)]
            count, torn = self.end(source, prefix)
            for number in range(count):
                yield from walk((*prefix, (source, number)))
            if torn:
                yield FAILED_FACT

        values: list[Any] = []
        for fact in walk(()):
            if fact.kind == "failed":
                return Delivered(tuple(values), failed=True)
            if fact.kind == "value":
                values.append(fact.value)
        return Delivered(tuple(values))
