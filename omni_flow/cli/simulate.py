"""`omni-flow simulate`: a graph under random schedules, held against the sequential reference."""

from __future__ import annotations

from typing import Annotated

import typer

from omni_flow.cli import target
from omni_flow.cli.command import Debug, TargetArgument, guarded, stderr
from omni_flow.cli.errors import ExitCode


@guarded
def command(
    name: TargetArgument,
    schedules: Annotated[int, typer.Option("--schedules", metavar="N", min=1, help="How many schedules.")] = 200,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Everything drawn follows from it.")] = 0,
    only: Annotated[
        int | None, typer.Option("--only", metavar="NUMBER", min=0, help="Run this schedule alone, as reported.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a graph on a virtual clock: reordering, duplicates, deaths, slow roles. No model is loaded.

    Roles are replaced by seeded stand-ins made from the graph. Exit code 1 if a schedule departs from the reference or
    an interface was never active.
    """
    from omni_flow.testing.simulate import simulate

    graph = target.load(name).graph.compile()
    with stderr().status(f"simulating {graph.name} under {schedules} schedules"):
        report = simulate(graph, schedules=schedules, seed=seed, only=only)
    typer.echo(report.show())
    if not report.ok:
        raise typer.Exit(ExitCode.FAILED)
