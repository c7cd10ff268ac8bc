"""`omni-flow lint`: every finding of a graph, before anything is launched."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from omni_flow.cli import target
from omni_flow.cli.command import Debug, TargetArgument, guarded
from omni_flow.cli.errors import ExitCode
from omni_flow.control.compiled import examine
from omni_flow.control.findings import Finding


@guarded
def command(
    name: TargetArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Look for mistakes in a graph. Exit code 2 if there is an error; notes are no errors."""
    graph = target.load(name).graph
    findings = examine(graph).findings
    errors = sum(f.level == "error" for f in findings)
    if as_json:
        rows = [{k: getattr(f, k) for k in ("level", "code", "what", "mend", "where")} for f in findings]
        typer.echo(json.dumps({"graph": graph.name, "findings": rows}, indent=2))
    else:
        out = Console(soft_wrap=True, highlight=False, markup=False)
        for finding in findings:
            out.print(_shown(finding))
        notes = len(findings) - errors
        verdict = "cannot work" if errors else "is fine"
        out.print(f"graph {graph.name!r} {verdict}: {_number(errors, 'error')}, {_number(notes, 'note')}")
    if errors:
        raise typer.Exit(ExitCode.WRONG_INPUT)


def _shown(finding: Finding) -> Text:
    style = "bold red" if finding.level == "error" else "bold cyan"
    place = f"{finding.where}: " if finding.where else ""
    return Text.assemble(
        place, (f"{finding.level} [{finding.code}]", style), f" {finding.what}", f"\n    mend: {finding.mend}"
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
