"""`omni-flow run`: launch a graph, send one request, show what comes back.

The flags depend on the graph, so the arguments are looked at twice: here for the TARGET, then by a command that is made
for that graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from omni_flow.cli import target
from omni_flow.cli.command import Debug, guard
from omni_flow.cli.execute import Options, execute
from omni_flow.cli.flags import Flag, flags_of, read_inputs, read_params, read_replicas
from omni_flow.cli.target import Target
from omni_flow.control.compiled import CompiledGraph

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
DEFAULT_OUT = Path("omni-flow-out")

_OPTIONS: dict[str, Any] = {
    "deadline": Annotated[
        float | None, typer.Option("--deadline", metavar="S", help="Seconds the request may take.", min=0.001)
    ],
    "param": Annotated[list[str] | None, typer.Option("--param", metavar="K=V", help="A param of the graph.")],
    "replicas": Annotated[
        list[str] | None, typer.Option("--replicas", metavar="ROLE=N", help="How many replicas of a role.")
    ],
    "show_timeline": Annotated[bool, typer.Option("--timeline", help="Show what ran when, and where.")],
    "out": Annotated[Path, typer.Option("--out", metavar="DIR", help="Where sound, pictures and arrays are written.")],
    "as_json": Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing before.")],
    "one_process": Annotated[bool, typer.Option("--one-process", help="Run all roles in this process.")],
    "debug": Debug,
}
_DEFAULTS: dict[str, Any] = {"out": DEFAULT_OUT, "deadline": None, "param": None, "replicas": None}
OWN_FLAGS = (
    "--deadline",
    "--param",
    "--replicas",
    "--timeline",
    "--out",
    "--json",
    "--one-process",
    "--debug",
    "--help",
)
_VALUELESS = ("--timeline", "--json", "--one-process", "--debug", "--help", "-h")


def command(context: typer.Context) -> None:
    """Launch a graph, send one request and show what comes back: `run TARGET --help` shows the graph's own flags."""
    args = list(context.args)
    with guard("--debug" in args):
        name = _target_in(args)
        found = target.load(name) if name is not None else None
        graph = found.graph.compile() if found is not None else None
    flags = flags_of(graph, OWN_FLAGS) if graph is not None else ()
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False,
                        context_settings={"help_option_names": ["-h", "--help"]})  # fmt: skip
    inner.command()(_made_for(found, graph, flags))
    inner(args, prog_name="omni-flow run")


def _target_in(args: Sequence[str]) -> str | None:
    """The first argument that is neither a flag nor the value of one."""
    rest = iter(args)
    for arg in rest:
        if not arg.startswith("-"):
            return arg
        if arg not in _VALUELESS and "=" not in arg:
            next(rest, None)
    return None


def _made_for(found: Target | None, graph: CompiledGraph | None, flags: Sequence[Flag]) -> Callable[..., None]:
    """A command with a parameter for each flag."""

    def command(**given: Any) -> None:
        assert found is not None
        assert graph is not None
        with guard(given["debug"]):
            inputs = read_inputs(flags, [given[f"input_{k}"] for k in range(len(flags))])
            options = Options(
                params=read_params(graph, given["param"] or []),
                replicas=read_replicas(graph, given["replicas"] or []),
                deadline=given["deadline"],
                timeline=given["show_timeline"],
                out=given["out"],
                as_json=given["as_json"],
                processes=not given["one_process"],
            )
            raise typer.Exit(execute(found, graph, inputs, options))

    hint = typer.Argument(metavar="TARGET", help="A folder with graph.py, a .py file, or module:attr.")
    kinds: dict[str, Any] = {"target": Annotated[str, hint]}
    for k, flag in enumerate(flags):
        option = typer.Option(flag.name, metavar=flag.metavar, help=flag.help, rich_help_panel="Inputs of the graph")
        kinds[f"input_{k}"] = Annotated[str | None, option]
    kinds |= _OPTIONS
    empty = inspect.Parameter.empty
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=kind,
                default=empty
                if name == "target"
                else _DEFAULTS.get(name, None if name.startswith("input_") else False),
            )
            for name, kind in kinds.items()
        ]
    )
    command.__annotations__ = kinds
    command.__doc__ = "Launch a graph, send one request and show what comes back."
    if graph is None:
        command.__doc__ += " With a TARGET, --help shows the flags of its inputs too."
    return command
