"""The command line: one subcommand per task, see `docs/cli.md`."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from omni_flow.cli import doctor, draw, explain, lint, simulate
from omni_flow.cli.run import CONTEXT
from omni_flow.cli.run import command as run_command
from omni_flow.data.cli import memory_app
from omni_flow.serve import cli as serving

app = typer.Typer(
    name="omni-flow",
    help="Serve any-to-any multimodal models: a graph of unlike parts, run decentralised and asynchronous.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"omni-flow {importlib.metadata.version('omni-flow')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("run", context_settings=CONTEXT, add_help_option=False)(run_command)
app.command("serve")(serving.serve)
app.command("key")(serving.key)
app.command("top")(serving.top)
app.command("trace")(serving.trace)
app.command("lint")(lint.command)
app.command("draw")(draw.command)
app.command("explain")(explain.command)
app.command("simulate")(simulate.command)
app.command("doctor")(doctor.command)
app.add_typer(memory_app, name="memory")


def run() -> None:
    """The entry point of the `omni-flow` script."""
    app()
