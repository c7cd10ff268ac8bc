"""`omni-flow doctor`: what this machine is, what is installed, what is missing and how to get it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from omni_flow.cli import packages, system
from omni_flow.cli.command import Debug, guarded
from omni_flow.cli.errors import ExitCode
from omni_flow.cli.packages import CORE, MODELS, Extra

PURPOSE = {
    CORE: "graphs, runtime, memory manager, this command",
    "torch": "tensors of PyTorch in payloads and weights",
    "serve": "the HTTP API and its web page",
    "media": "sound and pictures as files",
    "sglang": "the LLM engine",
    "ray": "clusters of machines",
    "redis": "the registry of a cluster",
    "nixl": "transfers over RDMA and NVLink",
    "mooncake": "transfers over RDMA",
    "client": "using a served graph from Python",
    "otel": "traces of requests",
    "demo": "examples/voice_vision_chat, libraries",
    MODELS: "examples/voice_vision_chat, its models",
    "dev": "tests, lint and types",
}
_MARKS = {"ok": ("✓", "green"), "low": ("!", "yellow"), "missing": ("✗", "red"), "partly": ("○", "dim")}


@guarded
def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Say what is installed, what is missing and the command that brings it. Exit code 1 if the core can't work."""
    facts, extras = system.facts(), packages.extras()
    if as_json:
        found = {"system": [dataclasses.asdict(f) for f in facts], "extras": [_as_dict(e) for e in extras]}
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(facts, extras)
    if any(f.level == "missing" for f in facts) or not extras[0].complete:
        raise typer.Exit(ExitCode.FAILED)


def _print(facts: list[system.Fact], extras: list[Extra]) -> None:
    out = Console(soft_wrap=True, highlight=False, markup=False)
    out.print(Text("this machine", "bold"))
    for fact in facts:
        out.print(_line(fact.level, f"{fact.name:<22} {fact.value}"))
        if fact.mend:
            out.print(f"      {fact.mend}")
    out.print(Text("\nomni-flow", "bold"))
    for extra in extras:
        name = f"[{extra.name}]" if extra.name not in (CORE, MODELS) else extra.name or "core"
        out.print(_line(_level(extra), f"{name:<22} {PURPOSE.get(extra.name, '')}"))
        have = [f"{p.name} {p.installed}" for p in extra.packages if p.fits]
        lack = [f"{p.wanted} ({p.installed or 'not installed'})" for p in extra.packages if not p.fits]
        if have:
            out.print(Text(f"      have: {', '.join(have)}", "dim"))
        if lack:
            out.print(f"      lack: {', '.join(lack)}")
            out.print(f"      get:  {extra.command}")
        if extra.unsupported:
            out.print(f"      {extra.unsupported}")


def _level(extra: Extra) -> str:
    if extra.complete:
        return "ok"
    return "missing" if extra.name == CORE else "partly"


def _line(level: str, text: str) -> Text:
    mark, style = _MARKS[level]
    return Text.assemble("  ", (mark, style), " ", text)


def _as_dict(extra: Extra) -> dict[str, object]:
    return {"complete": extra.complete, **dataclasses.asdict(extra), "purpose": PURPOSE.get(extra.name, "")}
