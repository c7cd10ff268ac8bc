"""Simulate a graph: the real control flow under random schedules, held against the sequential reference.

Open here. `simulate` is what users call on a graph of their own, `run_one` what the fuzzer calls; `world.py` is the
simulated surroundings, `schedule.py` what varies, `reference.py` the right answer, `compare.py` the verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from omni_flow.control.compile import compile_spec
from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.plan import Plan
from omni_flow.control.spec import GraphSpec
from omni_flow.testing.compare import Expected, compare, expect
from omni_flow.testing.facts import Behave
from omni_flow.testing.generate import random_inputs
from omni_flow.testing.roles import Override, Roles
from omni_flow.testing.schedule import Faults, Schedule, random_schedule
from omni_flow.testing.standins import Standins
from omni_flow.testing.world import World

SCHEDULES_PER_REQUEST = 8
"""Schedules that share the inputs and the behaviour of one drawn request."""

DEFAULT_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class Divergence:
    """A run that departed from the reference. `simulate(graph, seed=..., only=number)` runs it alone again."""

    number: int
    what: tuple[str, ...]
    schedule: Schedule
    inputs: Mapping[str, Any]


@dataclass(slots=True)
class Report:
    """What was simulated. `idle` are the interfaces that never were active in any run."""

    graph: str
    seed: int
    schedules: int = 0
    activations: int = 0
    absent: int = 0
    failed: int = 0
    deaths: int = 0
    duplicates: int = 0
    batched: int = 0
    events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    active: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no run departed from the reference and every interface was active in some run."""
        return not self.divergences and not self.idle

    def show(self) -> str:
        """The report as text."""
        outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.outcomes.items()))
        lines = [
            f"graph {self.graph!r}, seed {self.seed}: {self.schedules} schedules ({outcomes}), {self.events} events",
            f"  {self.activations} activations, {self.absent} absent and {self.failed} failed facts",
            f"  {self.deaths} deaths, {self.duplicates} duplicates, {self.batched} activations shared a batch",
        ]
        if self.idle:
            lines.append(f"  never active: {', '.join(sorted(self.idle))}")
        lines.append(f"  {len(self.divergences)} divergences")
        for divergence in self.divergences[:10]:
            lines.append(f"  schedule {divergence.number}: {divergence.schedule}, inputs {dict(divergence.inputs)!r}")
            lines += [f"    {what}" for what in divergence.what]
        return "\n".join(lines)


def simulate(
    graph: GraphSpec | CompiledGraph,
    *,
    schedules: int = 200,
    seed: int = 0,
    inputs: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    roles: Behave | Mapping[str, Override] | None = None,
    faults: Faults = DEFAULT_FAULTS,
    only: int | None = None,
) -> Report:
    """Run a graph under random schedules and hold each run against the sequential reference.

    Args:
        schedules: how many.
        seed: everything drawn follows from it.
        inputs: of the request; drawn anew for every few schedules if None.
        params: overrides of the graph's parameters.
        roles: what roles do: seeded stand-ins if None; a mapping gives some of them (see `roles.py`); a function of
            the activation gives all. Each is asked once for an activation with the same inputs.
        faults: what schedules may contain.
        only: run only the schedule of this number, as a divergence names it.

    Raises:
        GraphError: the graph has lint errors.
        UnknownRoleError: `roles` names what the graph doesn't have.
    """
    spec = graph if isinstance(graph, GraphSpec) else graph.spec
    plan = compile_spec(spec) if isinstance(graph, GraphSpec) else graph.plan
    report = Report(spec.name, seed)
    request: Request | None = None
    for number in range(schedules):
        if number % SCHEDULES_PER_REQUEST == 0 or request is None:
            drawn = Random(f"{seed}/{number // SCHEDULES_PER_REQUEST}")
            sent = random_inputs(drawn, spec) if inputs is None else inputs
            standins = Standins(spec, drawn.getrandbits(32))
            behave = roles if callable(roles) else Roles(spec, roles, standins) if roles else standins
            request = Request(plan, spec, sent, params or {}, behave)
        if only is None or only == number:
            request.run(Random(f"{seed}:{number}").getrandbits(48), number, faults, report)
    report.idle = {interface.name for interface in spec.interfaces} - report.active
    return report


class Request:
    """One request of a graph, ready to be run under many schedules."""

    def __init__(
        self, plan: Plan, spec: GraphSpec, inputs: Mapping[str, Any], params: Mapping[str, Any], behave: Behave
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.inputs = inputs
        self.params = params
        self.behave = behave
        self.expected: Expected = expect(plan, spec, inputs, params, behave)
        self.mortal = {role.name: 10**6 for role in spec.roles}
        for interface in spec.interfaces:
            # What wins a race may differ the second time: such an interface can't be replayed.
            allowed = -1 if interface.race else interface.retries
            self.mortal[interface.role] = min(self.mortal.get(interface.role, 10**6), allowed)
        self.batchable = [i.name for i in spec.interfaces if not any(output.stream for output in i.outputs)]
        size = len(self.expected.facts) + len(self.expected.ends)
        self.steps = 20 + 4 * size
        self.patience = 20_000 + 1_000 * size

    def schedule(self, seed: int, faults: Faults) -> Schedule:
        """The schedule of `seed`."""
        return random_schedule(seed, self.mortal, self.steps, faults, self.batchable)

    def run(self, seed: int, number: int, faults: Faults, report: Report) -> None:
        """Run it under the schedule of `seed` and add what happened to `report`."""
        schedule = self.schedule(seed, faults)
        world = World(self.plan, schedule, self.inputs, self.params, self.behave, self.expected.given, self.patience)
        seen = world.seen
        try:
            world.run()
        except Exception as error:  # whatever the core raises is a finding of this run, not the end of the others
            seen.contradictions.append(f"{type(error).__name__}: {error}")
        what = compare(self.plan, self.spec, self.inputs, self.params, self.behave, schedule, seen, self.expected)
        if not seen.deaths and not seen.stopped:
            self.steps = max(seen.steps, 1)
        report.schedules += 1
        report.activations += sum(len(runs) for runs in seen.runs.values())
        report.absent += sum(message.kind == 1 for message in seen.facts.values())
        report.failed += sum(message.kind == 2 for message in seen.facts.values())
        report.deaths += seen.deaths
        report.duplicates += seen.duplicates
        report.batched += seen.batched
        report.events += seen.steps
        report.outcomes[seen.outcome or "none"] += 1
        report.active.update(name for name, _ in seen.runs)
        if what:
            report.divergences.append(Divergence(number, tuple(what), schedule, self.inputs))
