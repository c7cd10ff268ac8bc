"""`omni-flow draw`: a graph as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omni_flow.cli import target
from omni_flow.cli.command import Debug, TargetArgument, guarded
from omni_flow.cli.errors import UserError, did_you_mean

SUFFIXES = (".svg", ".png", ".mmd")


@guarded
def command(
    name: TargetArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="x.svg, x.png or x.mmd; Mermaid on stdout if left out."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw a graph as SVG, PNG or Mermaid."""
    from omni_flow.control import draw

    if output is not None and output.suffix not in SUFFIXES:
        raise UserError(f"{output}: no kind of picture is called {output.suffix or 'that'}", _kinds(output.suffix))
    graph = target.load(name).graph.compile()
    if output is None:
        typer.echo(draw.mermaid(graph))
        return
    try:
        if output.suffix == ".png":
            data = draw.png(graph)
        else:
            data = (draw.svg if output.suffix == ".svg" else draw.mermaid)(graph).encode()
        output.write_bytes(data)
    except (ImportError, OSError) as error:
        raise UserError(f"{output}: {getattr(error, 'strerror', None) or error}") from error
    typer.echo(f"{output}: {len(graph.interfaces)} interfaces of {len(graph.roles)} roles")


def _kinds(suffix: str) -> str:
    near = did_you_mean(suffix, SUFFIXES)
    return near if near.startswith("did") else f"name it {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
