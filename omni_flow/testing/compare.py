"""What a run is held against: the reference's result in the words of the plan, and where a run departs from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_flow.control.facts import FAILED, MISSING
from omni_flow.control.plan import Interface, Path, Plan
from omni_flow.control.spec import GraphSpec, SlotSpec
from omni_flow.testing import facts
from omni_flow.testing.cutting import Cuts, InvalidChoiceError, is_timed
from omni_flow.testing.facts import Activation, Behave, Given, Result
from omni_flow.testing.parties import Observed
from omni_flow.testing.reference import interpret
from omni_flow.testing.schedule import Schedule

KINDS = {"absent": MISSING, "failed": FAILED}
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference's result. Paths are tuples of numbers; `given` is what each activation gave, by its inputs."""

    result: Result
    runs: Mapping[tuple[str, Path], facts.Run]
    given: Mapping[tuple[str, Path], tuple[Mapping[str, Any], Given]]
    facts: Mapping[tuple[int, Path], facts.Fact]
    ends: Mapping[tuple[int, Path], tuple[int, bool]]


def numbers(path: facts.Path) -> Path:
    """A path as the plan writes it: its sources are known from the scope."""
    return tuple(number for _, number in path)


def expect(
    plan: Plan,
    spec: GraphSpec,
    inputs: Mapping[str, Any],
    params: Mapping[str, Any],
    behave: Behave,
    choices: Mapping[tuple[str, facts.Path], int] | None = None,
    cuts: Mapping[tuple[str, facts.Path], Cuts] | None = None,
) -> Expected:
    """What the reference says of a request."""
    given: dict[tuple[str, Path], tuple[Mapping[str, Any], Given]] = {}

    def recording(activation: Activation) -> Given:
        found = behave(activation)
        given[activation.interface, numbers(activation.path)] = (activation.inputs, found)
        return found

    result = interpret(spec, inputs, params, recording, choices, cuts)
    return Expected(
        result=result,
        runs={(name, numbers(path)): run for (name, path), run in result.runs.items()},
        given=given,
        facts={
            (plan.field_ids[name], numbers(path)): fact
            for (name, path), fact in result.facts.items()
            if name in plan.field_ids
        },
        ends={
            (plan.source_ids[name], numbers(path)): end
            for (name, path), end in result.ends.items()
            if name in plan.source_ids
        },
    )


def choices_of(plan: Plan, seen: Observed) -> dict[tuple[str, facts.Path], int]:
    """The groups that won in the interfaces with `race`."""
    racing = {i.name: [plan.sources[source].name for source in i.scope] for i in plan.interfaces if i.race}
    return {
        (name, tuple(zip(racing[name], path, strict=True))): runs[0][0]
        for (name, path), runs in seen.runs.items()
        if name in racing
    }


def slots_of(interface: Interface) -> list[SlotSpec]:
    return [slot for group in interface.spec.groups for slot in group]


def cuts_of(plan: Plan, seen: Observed) -> dict[tuple[str, facts.Path], Cuts]:
    """Where windows of timed policies were cut. Those of one parent run all alike, or only the first of them do."""
    found: dict[tuple[str, facts.Path], Cuts] = {}
    for interface in plan.interfaces:
        windowed = next(filter(is_timed, slots_of(interface)), None)
        if windowed is None or interface.window is None:
            continue
        names = [plan.sources[source].name for source in interface.scope]
        runs = sorted((path, runs[0][1]) for (name, path), runs in seen.runs.items() if name == interface.name)
        parents = {path[:-1] for path, _ in runs} | {path for source, path in seen.ends if source == interface.window}
        for parent in parents:
            sizes: list[int] = []
            for number, given in [(path[-1], given) for path, given in runs if path[:-1] == parent]:
                if number == len(sizes):
                    context = min(windowed.left, sum(sizes))
                    sizes.append(len(given[windowed.param]) - context)
            end = seen.ends.get((interface.window, parent))
            path = tuple(zip(names[:-1], parent, strict=True))
            found[names[-1], path] = Cuts(sizes, None if end is None else end[0])
    return found


def compare(
    plan: Plan,
    spec: GraphSpec,
    inputs: Mapping[str, Any],
    params: Mapping[str, Any],
    behave: Behave,
    schedule: Schedule,
    seen: Observed,
    expected: Expected,
) -> list[str]:
    """Where a run departs from the reference; empty if nowhere."""
    if any(interface.race or any(map(is_timed, slots_of(interface))) for interface in plan.interfaces):
        try:
            expected = expect(plan, spec, inputs, params, behave, choices_of(plan, seen), cuts_of(plan, seen))
        except InvalidChoiceError as error:
            return [str(error)]
    found = [*seen.contradictions[:SHOWN], *seen.left[:SHOWN]]
    found += _outcome(schedule, seen, expected)
    found += _runs(plan, schedule, seen, expected)
    found += _facts(plan, seen, expected)
    return found


def _outcome(schedule: Schedule, seen: Observed, expected: Expected) -> list[str]:
    found = []
    if seen.outcomes != 1 and not (seen.orphaned and seen.outcomes == 0):
        found.append(f"{seen.outcomes} outcomes")
    forced = None
    if seen.stopped and schedule.stop is not None:
        forced = "cancelled" if schedule.stop.how == "cancel" else "deadline"
    elif seen.lost and schedule.lossy:
        forced = "failed"
    cut = (forced is not None and seen.outcome == forced) or (seen.orphaned and seen.outcome is None)
    if not cut and seen.outcome != expected.result.outcome:
        found.append(f"outcome {seen.outcome}, not {forced or expected.result.outcome}")
    for name, delivered in expected.result.outputs.items():
        values = seen.outputs[name]
        right = list(delivered.values)
        if values != (right[: len(values)] if cut else right):
            found.append(f"output {name}: {values!r}, not {right!r}")
        if not cut and delivered.failed != (name in seen.failed):
            found.append(f"output {name}: failed is {name in seen.failed}, not {delivered.failed}")
    return found


def _runs(plan: Plan, schedule: Schedule, seen: Observed, expected: Expected) -> list[str]:
    found = []
    for key, runs in seen.runs.items():
        right = expected.runs.get(key)
        if right is None:
            found.append(f"{_show(key)} ran with {runs[0]!r}, but should not")
        elif any(run != right for run in runs):
            found.append(f"{_show(key)} ran with {runs!r}, not {right!r}")
        if len(runs) > 1 and not seen.deaths:
            found.append(f"{_show(key)} ran {len(runs)} times")
    if schedule.drain and not seen.stopped and not seen.lost and not seen.orphaned:
        found += [f"{_show(key)} did not run" for key in expected.runs if key not in seen.runs]
    if not seen.deaths:
        ordered = {interface.name for interface in plan.interfaces if interface.ordered}
        for name in ordered & seen.starts.keys():
            last: dict[Path, int] = {}
            for path in seen.starts[name]:
                if last.get(path[:-1], -1) > path[-1]:
                    found.append(f"{_show((name, path))} started after {last[path[:-1]]}")
                last[path[:-1]] = path[-1]
    return found[:SHOWN]


def _facts(plan: Plan, seen: Observed, expected: Expected) -> list[str]:
    found = []
    for (field, path), message in seen.facts.items():
        right = expected.facts.get((field, path))
        if right is None:
            if not plan.fields[field].name.endswith("!done"):
                found.append(f"a fact of {plan.fields[field].name} at {path}, which does not exist")
        elif message.kind != KINDS.get(right.kind, 0) or (right.kind == "value" and message.value != right.value):
            found.append(f"fact of {plan.fields[field].name} at {path}: {message!r}, not {right!r}")
    for (source, path), end in seen.ends.items():
        right_end = expected.ends.get((source, path))
        if right_end != end:
            found.append(f"end of {plan.sources[source].name} under {path}: {end}, not {right_end}")
    return found[:SHOWN]


def _show(key: tuple[str, Path]) -> str:
    return f"{key[0]} at {key[1]}"
