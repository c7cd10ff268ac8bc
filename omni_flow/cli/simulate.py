"""`omni-flow simulate`: a graph under random schedules, held against the sequential reference."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from omni_flow.cli import target
from omni_flow.cli.command import Debug, TargetArgument, guarded, stderr
from omni_flow.cli.errors import ExitCode, UserError, did_you_mean
from omni_flow.control.compiled import CompiledGraph

OURS = str(Path(__file__).parents[1])


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """What an interface gives for the inputs `when`: (output, value) pairs in order, and whether it raises then."""

    when: dict[str, Any]
    give: list[tuple[str, Any]] = []
    raises: bool = False


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """A file of `--case`. `inputs` by placeholder: null if not sent, a list if streamed. `tables` by interface."""

    inputs: dict[str, Any] | None = None
    params: dict[str, Any] = {}
    tables: dict[str, list[Row]] = {}


@guarded
def command(
    name: TargetArgument,
    schedules: Annotated[int, typer.Option("--schedules", metavar="N", min=1, help="How many schedules.")] = 200,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Everything drawn follows from it.")] = 0,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="NAME[=PLACE]",
            help="Run the role's own class, or the class or function at PLACE (file.py:name or module:name).",
        ),
    ] = None,
    case: Annotated[
        Path | None, typer.Option("--case", metavar="FILE", help="JSON: inputs, params, and tables by interface.")
    ] = None,
    only: Annotated[
        int | None, typer.Option("--only", metavar="NUMBER", min=0, help="Run this schedule alone, as reported.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a graph on a virtual clock: reordering, duplicates, deaths, slow roles. No model is loaded.

    Roles are replaced by seeded stand-ins made from the graph, unless --role or --case say otherwise. Exit code 1 if a
    schedule departs from the reference or an interface was never active.
    """
    from omni_flow.testing.simulate import simulate

    graph = target.load(name).graph.compile()
    given = _case(case, graph) if case is not None else Case()
    overrides: dict[str, Any] = {i: [msgspec.to_builtins(row) for row in rows] for i, rows in given.tables.items()}
    overrides |= _roles(graph, roles or [])
    with stderr().status(f"simulating {graph.name} under {schedules} schedules"):
        try:
            report = simulate(
                graph,
                schedules=schedules,
                seed=seed,
                inputs=given.inputs,
                params=given.params,
                roles=overrides or None,
                only=only,
            )
        except Exception as error:
            place = _users_place(error)
            if debug or not (place or isinstance(error, LookupError)):
                raise
            message = f"{place}: {type(error).__name__}: {error}" if place else str(error)
            raise UserError(message, "stand-ins give values of the declared types; --role runs your own") from error
    typer.echo(report.show())
    if not report.ok:
        raise typer.Exit(ExitCode.FAILED)


def _case(path: Path, graph: CompiledGraph) -> Case:
    try:
        case = msgspec.json.decode(path.read_bytes(), type=Case)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "check the path") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: {error}", "see the form in docs/cli.md") from error
    for kind, names, known in (
        ("placeholder", case.inputs or {}, graph.placeholders),
        ("param", case.params, graph.params),
        ("interface", case.tables, graph.interfaces),
    ):
        _check_names(f"{path}", kind, names, known)
    return case


def _roles(graph: CompiledGraph, given: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given:
        name, _, place = text.partition("=")
        known = [*graph.roles, *graph.interfaces] if place else list(graph.roles)
        _check_names("--role", "role or interface" if place else "role", [name], known)
        found[name] = target.load_object(place) if place else graph.roles[name].factory
    return found


def _check_names(where: str, kind: str, names: Mapping[str, Any] | Sequence[str], known: Any) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{where}: the graph has no {kind} {name!r}", did_you_mean(name, known))


def _users_place(error: Exception) -> str:
    """The last line of the user's own code that `error` came through, if it is where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return "" if last.filename.startswith(OURS) else f"{last.filename}:{last.lineno}"
