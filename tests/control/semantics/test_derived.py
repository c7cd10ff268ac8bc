"""What the text says of small graphs, in the reference, under random schedules, on one loop and between processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from cases_groups import case as of_groups
from cases_loops import case as of_loops
from cases_streams import case as of_streams
from derived import Case
from holding import FAILED, holds
from real import Outcome, real, request

from omni_flow import alaunch
from omni_flow.testing.generate import SHAPES, random_request
from omni_flow.testing.notation import parse_graph
from omni_flow.testing.reference import interpret
from omni_flow.testing.standins import Functions, Standins

CASES = [*of_groups, *of_streams, *of_loops]


def expected(case: Case) -> Outcome:
    outputs = {name: [v for v in values if v is not FAILED] for name, values in case.outputs.items()}
    return Outcome(case.outcome, outputs, frozenset(name for name, values in case.outputs.items() if FAILED in values))


async def found(case: Case, **options: Any) -> Outcome:
    spec = parse_graph(case.graph)
    async with alaunch(real(spec, Functions(**case.roles)), **options) as app:
        return await request(app, spec, case.inputs, case.params)


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_the_reference_and_random_schedules_agree_with_the_text(case: Case) -> None:
    holds(case.graph, case.inputs, case.outputs, outcome=case.outcome, runs=case.runs, params=case.params, **case.roles)


@each_case
@pytest.mark.parametrize("credit", [1, 64])
def test_the_runtime_on_one_loop_agrees_with_the_text(case: Case, credit: int) -> None:
    assert asyncio.run(found(case, processes=False, credit=credit)) == expected(case)


@each_case
def test_the_runtime_between_processes_agrees_with_the_text(case: Case) -> None:
    assert asyncio.run(found(case, memory=None)) == expected(case)


async def agrees(seed: int, **options: Any) -> None:
    """A random graph with random inputs comes to the same in the runtime as in the reference."""
    rng = Random(seed)
    drawn = random_request(rng, replace(SHAPES[seed % len(SHAPES)], race=0.0))
    behave = Standins(drawn.spec, seed)
    right = interpret(drawn.spec, drawn.inputs, drawn.params, behave)
    graph = real(drawn.spec, behave, replicas=rng.randint(1, 3))
    async with alaunch(graph, credit=rng.choice([1, 2, 3, 64]), **options) as app:
        seen = await request(app, drawn.spec, drawn.inputs, drawn.params)
    assert seen == Outcome(
        right.outcome,
        {name: list(delivered.values) for name, delivered in right.outputs.items()},
        frozenset(name for name, delivered in right.outputs.items() if delivered.failed),
    )


@pytest.mark.parametrize("seed", range(200))
def test_a_random_graph_comes_to_the_same_on_one_loop(seed: int) -> None:
    asyncio.run(agrees(seed, processes=False))


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_a_random_graph_comes_to_the_same_between_processes(seed: int) -> None:
    asyncio.run(agrees(seed, memory=None))
