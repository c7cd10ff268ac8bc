"""`omni-flow run`: launch a graph, send a request or several of one session, show what comes back.

The flags depend on the graph, so the arguments are looked at twice: here for the TARGET, then by a command that is made
for that graph. Behind `--then` stand the inputs of the next request of the session, read by a command of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from omni_flow.cli import target
from omni_flow.cli.command import Debug, guard
from omni_flow.cli.errors import UserError
from omni_flow.cli.execute import Options, execute
from omni_flow.cli.flags import Flag, Inputs, flags_of, read_inputs, read_params, read_replicas
from omni_flow.cli.show import check_folder
from omni_flow.cli.target import Target
from omni_flow.cli.tiers import Ssd, SsdBytes, memory_options
from omni_flow.cli.values import STDIN
from omni_flow.control.compiled import CompiledGraph

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
DEFAULT_OUT = Path("omni-flow-out")

_OPTIONS: dict[str, Any] = {
    "then": Annotated[
        bool, typer.Option("--then", help="What follows are the inputs of the next request of this session.")
    ],
    "deadline": Annotated[
        float | None, typer.Option("--deadline", metavar="S", help="Seconds the request may take.", min=0.001)
    ],
    "param": Annotated[list[str] | None, typer.Option("--param", metavar="K=V", help="A param of the graph.")],
    "replicas": Annotated[
        list[str] | None, typer.Option("--replicas", metavar="ROLE=N", help="How many replicas of a role.")
    ],
    "ssd": Ssd,
    "ssd_bytes": SsdBytes,
    "show_timeline": Annotated[bool, typer.Option("--timeline", help="Show what ran when, and where.")],
    "out": Annotated[Path, typer.Option("--out", metavar="DIR", help="Where sound, pictures and arrays are written.")],
    "as_json": Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing before.")],
    "one_process": Annotated[bool, typer.Option("--one-process", help="Run all roles in this process.")],
    "debug": Debug,
}
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("deadline", "param", "replicas", "ssd", "ssd_bytes")),
    **dict.fromkeys(("then", "show_timeline", "as_json", "one_process", "debug"), False),
    "out": DEFAULT_OUT,
}
THEN = "--then"
OWN_FLAGS = (
    THEN,
    "--deadline",
    "--param",
    "--replicas",
    "--ssd",
    "--ssd-bytes",
    "--timeline",
    "--out",
    "--json",
    "--one-process",
    "--debug",
    "--help",
)
_VALUELESS = ("--timeline", "--json", "--one-process", "--debug", "--help", "-h")


def command(context: typer.Context) -> None:
    """Launch a graph, send a request and show what comes back: `run TARGET --help` shows the graph's own flags."""
    args, *later = _split(context.args)
    with guard("--debug" in context.args):
        name = _target_in(args)
        found = target.load(name) if name is not None else None
        graph = found.graph.compile() if found is not None else None
    flags = flags_of(graph, OWN_FLAGS) if graph is not None else ()
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False,
                        context_settings={"help_option_names": ["-h", "--help"]})  # fmt: skip
    turns = [_given(flags, turn) for turn in later]
    inner.command()(_made_for(found, graph, flags, [given for given, _ in turns]))
    inner(args + [arg for _, rest in turns for arg in rest], prog_name="omni-flow run")


def _split(args: Sequence[str]) -> list[list[str]]:
    """The arguments of each turn."""
    turns: list[list[str]] = [[]]
    for arg in args:
        if arg == THEN:
            turns.append([])
        else:
            turns[-1].append(arg)
    return turns


def _given(flags: Sequence[Flag], args: Sequence[str]) -> tuple[list[str | None], list[str]]:
    """What a later turn gives for each flag, and the rest, which belongs to the whole command."""
    found: dict[str, Any] = {}
    turn = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    kinds = {"context": typer.Context, **_kinds(flags)}
    turn.command(add_help_option=False, context_settings=settings)(_with(kinds, found.update))
    turn(list(args), prog_name="omni-flow run", standalone_mode=False)
    return [found[f"input_{k}"] for k in range(len(flags))], found["context"].args


def _target_in(args: Sequence[str]) -> str | None:
    """The first argument that is neither a flag nor the value of one."""
    rest = iter(args)
    for arg in rest:
        if not arg.startswith("-"):
            return arg
        if arg not in _VALUELESS and "=" not in arg:
            next(rest, None)
    return None


def _made_for(
    found: Target | None, graph: CompiledGraph | None, flags: Sequence[Flag], later: Sequence[Sequence[str | None]]
) -> Callable[..., None]:
    """A command with a parameter for each flag. `later`: what the turns after the first give."""

    def command(**given: Any) -> None:
        assert found is not None
        assert graph is not None
        with guard(given["debug"]):
            if given["out"] != DEFAULT_OUT:
                check_folder(given["out"])
            turns = _read(flags, [[given[f"input_{k}"] for k in range(len(flags))], *later])
            options = Options(
                params=read_params(graph, given["param"] or []),
                replicas=read_replicas(graph, given["replicas"] or []),
                deadline=given["deadline"],
                timeline=given["show_timeline"],
                out=given["out"],
                as_json=given["as_json"],
                processes=not given["one_process"],
                launch=memory_options(given["ssd"], given["ssd_bytes"], given["one_process"]),
            )
            raise typer.Exit(execute(found, graph, turns, options))

    hint = typer.Argument(metavar="TARGET", help="A folder with graph.py, a .py file, or module:attr.")
    made = _with({"target": Annotated[str, hint], **_kinds(flags), **_OPTIONS}, command)
    made.__doc__ = "Launch a graph, send a request and show what comes back."
    if graph is None:
        made.__doc__ += " With a TARGET, --help shows the flags of its inputs too."
    return made


def _read(flags: Sequence[Flag], turns: Sequence[Sequence[str | None]]) -> list[Inputs]:
    """The inputs of every turn. Raises UserError as `read_inputs`, or where two turns read stdin."""
    if sum(STDIN in turn for turn in turns) > 1:
        raise UserError("two turns read stdin", "give all but one of them otherwise")
    return [read_inputs(flags, turn) for turn in turns]


def _kinds(flags: Sequence[Flag]) -> dict[str, Any]:
    """A parameter for each flag."""
    return {
        f"input_{k}": Annotated[
            str | None,
            typer.Option(flag.name, metavar=flag.metavar, help=flag.help, rich_help_panel="Inputs of the graph"),
        ]
        for k, flag in enumerate(flags)
    }


def _with(kinds: dict[str, Any], call: Callable[..., None]) -> Callable[..., None]:
    """A function with these parameters that calls `call` with what they get."""

    def command(**given: Any) -> None:
        call(**given)

    empty = inspect.Parameter.empty
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=kind,
                default=empty if name in ("target", "context") else _DEFAULTS.get(name),
            )
            for name, kind in kinds.items()
        ]
    )
    command.__annotations__ = kinds
    return command
