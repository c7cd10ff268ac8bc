"""Long fuzz of the control flow: random graphs under random schedules against the sequential reference.

`python bench/fuzz.py --pairs N --seed S --jobs J [--record FILE]`. A pair is one random graph under one random schedule
(order of messages, delays, duplicates, deaths, cancels, deadlines, 1 to 3 shares, credit 1 to 3). Prints what was
covered and how long it took; exit code 1 if any pair diverged, with the command that runs the graph alone again.
`--record` writes the same as a page of Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from omni_flow.control.compile import compile_spec
from omni_flow.control.findings import GraphError
from omni_flow.control.spec import GraphSpec, Join
from omni_flow.testing.generate import SHAPES, random_request
from omni_flow.testing.schedule import Faults
from omni_flow.testing.simulate import Report, Request
from omni_flow.testing.standins import Standins

PAIRS_PER_GRAPH = 5
GRAPHS_PER_TASK = 200


EXPLAINED = """
Each pair runs the shares, ledgers and gateway request of the real control flow on a virtual clock: messages reordered
and delayed (exponential, heavy-tailed, channels up to 10^6 slower, newest first, oldest first), 0 to 50 % duplicated,
1 to 3 shares of each role, credit of 1 to 3 numbers and of a few bytes, batches of up to 4 activations, deaths with and
without retries, cancels and deadlines. Held against the sequential reference: outputs in order, outcome, every fact and
end, every activation with its inputs exactly once (deaths aside); where the request is left to run out, which is half
of the schedules, that every interface is down to one tombstone and all credit is back; after close, that nothing is
left. A cancel, a deadline or a loss gives one outcome and prefixes of the outputs. The theorem leaves `race` aside: the
reference is told who won.

That the comparison is sharp is shown by `tests/control/semantics/test_sharpness.py`, which switches each rule off alone
and demands a divergence; the graphs that broke once are in `tests/control/semantics/test_found.py`. What concerns
several requests (drains, the death of a gateway, late rosters, the bits of closed requests) is tried in the same way by
`tests/control/semantics/test_cluster.py`; small graphs worked out by hand, and random ones, run in the runtime itself
in `tests/control/semantics/test_derived.py`."""


@dataclass
class Tally:
    """What a stretch of graphs came to."""

    numbers: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    divergences: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.numbers.update(other.numbers)
        self.cpu_s += other.cpu_s
        self.divergences += other.divergences


def constructs(spec: GraphSpec) -> Counter[str]:
    """Which constructs a graph has, one count each."""
    slots = [slot for i in spec.interfaces for group in i.groups for slot in group]
    has = {
        "loop": any(i.max_iters is not None for i in spec.interfaces),
        "window": any(slot.join is Join.WINDOW for slot in slots),
        "window policy": any(slot.policy is not None for slot in slots),
        "ordered": any(slot.ordered for slot in slots),
        "count": any(slot.join is Join.COUNT for slot in slots),
        "several levels": any(slot.join not in (Join.PLAIN, Join.WINDOW) and slot.levels > 1 for slot in slots),
        "OR groups": any(len(i.groups) > 1 for i in spec.interfaces),
        "optional": any(slot.optional for slot in slots),
        "race": any(i.race for i in spec.interfaces),
        "sink": any(not i.outputs for i in spec.interfaces),
        "on_error=absent": any(i.on_error == "absent" for i in spec.interfaces),
        "streamed placeholder": any(p.stream for p in spec.placeholders),
        "shared role": len({i.role for i in spec.interfaces}) < len(spec.interfaces),
    }
    return Counter({f"graphs with {name}": 1 for name, found in has.items() if found})


def fuzz(seed: int, first: int, graphs: int) -> Tally:
    """Run graphs `first` to `first + graphs` of `seed`."""
    begin = time.process_time()
    tally = Tally()
    for number in range(first, first + graphs):
        drawn = random_request(Random(f"{seed}/{number}"), SHAPES[number % len(SHAPES)])
        try:
            plan = compile_spec(drawn.spec)
        except GraphError:
            tally.numbers["graphs refused by lint"] += 1
            continue
        tally.numbers["graphs"] += 1
        tally.numbers.update(constructs(drawn.spec))
        request = Request(plan, drawn.spec, drawn.inputs, drawn.params, Standins(drawn.spec, number))
        report = Report(f"{seed}/{number}", seed)
        for pair in range(PAIRS_PER_GRAPH):
            request.run(Random(f"{seed}/{number}/{pair}").getrandbits(48), pair, Faults(), report)
        tally.numbers.update(
            {
                "pairs": report.schedules,
                "events": report.events,
                "activations": report.activations,
                "absent facts": report.absent,
                "failed facts": report.failed,
                "deaths": report.deaths,
                "duplicates": report.duplicates,
                "activations that shared a batch": report.batched,
                **{f"outcome {name}": count for name, count in report.outcomes.items()},
            }
        )
        if report.divergences:
            tally.numbers["diverging pairs"] += len(report.divergences)
            command = f"python bench/fuzz.py --seed {seed} --graph {number}"
            tally.divergences.append(f"{command}\n{report.show()}")
    tally.cpu_s = time.process_time() - begin
    return tally


def machine() -> str:
    """Machine and versions, for the record."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}"


def show(args: argparse.Namespace, total: Tally, wall_s: float) -> str:
    """The record as Markdown."""
    pairs = total.numbers["pairs"]
    lines = [
        "# Fuzz of the control flow",
        "",
        f"`python bench/fuzz.py --pairs {args.pairs} --seed {args.seed} --jobs {args.jobs}` on {machine()}:",
        "",
        f"**{pairs:,} pairs of random graph and random schedule, {total.numbers['diverging pairs']} divergences.** "
        f"{wall_s:,.0f} s of wall time, {total.cpu_s:,.0f} s of CPU time, {pairs / max(total.cpu_s, 1e-9):,.0f} pairs "
        "per CPU second.",
        "",
        "| what | how many |",
        "|---|---|",
        *(f"| {name} | {count:,} |" for name, count in sorted(total.numbers.items())),
        *EXPLAINED.splitlines(),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--graph", type=int, help="run this graph alone, as a divergence names it")
    parser.add_argument("--record", type=Path, help="write the result to this file as well")
    args = parser.parse_args()
    begin = time.perf_counter()
    total = Tally()
    if args.graph is not None:
        total = fuzz(args.seed, args.graph, 1)
    else:
        graphs = -(-args.pairs // PAIRS_PER_GRAPH)
        with ProcessPoolExecutor(args.jobs) as pool:
            tasks = [
                pool.submit(fuzz, args.seed, first, min(GRAPHS_PER_TASK, graphs - first))
                for first in range(0, graphs, GRAPHS_PER_TASK)
            ]
            for task in as_completed(tasks):
                total.add(task.result())
                print(
                    f"\r{total.numbers['pairs']:,} pairs, {total.numbers['diverging pairs']} divergences",
                    end="",
                    file=sys.stderr,
                )
        print(file=sys.stderr)
    text = show(args, total, time.perf_counter() - begin)
    print(text)
    for divergence in total.divergences:
        print(divergence)
    if args.record is not None:
        args.record.write_text(text + "\n")
    return 1 if total.divergences else 0


if __name__ == "__main__":
    sys.exit(main())
