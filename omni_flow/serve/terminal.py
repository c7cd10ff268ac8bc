"""`omni-flow top` and `omni-flow trace`: a server seen from a terminal."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omni_flow.cli import timeline
from omni_flow.cli.errors import ExitCode, UserError
from omni_flow.control.runtime.live_request import Span

COLOURS = {"up": "green", "starting": "yellow", "degraded": "yellow", "leaving": "yellow", "down": "red"}


def ask(url: str, key: str | None, path: str) -> Any:
    """The JSON at a path. Raises UserError."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url}{path}", headers=headers, timeout=10.0)
    except httpx.HTTPError as error:
        raise UserError(f"{url}: {error}", "start one with `omni-flow serve`, or say where with --url") from error
    try:
        found = answer.json()
        told = found["error"]["message"] if answer.status_code >= 400 else None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{url}{path}: {answer.status_code}, and no answer of omni-flow", "see --url") from None
    if told is not None:
        raise UserError(f"{url}{path}: {told}", code=ExitCode.FAILED)
    return found


def top(url: str, key: str | None, once: bool, as_json: bool) -> None:
    """Show a server once a second until ^C, or once. Raises UserError."""
    path = "/v1/live?once=true"
    if as_json:
        print(json.dumps(ask(url, key, path)))
        return
    console = Console()
    if once or not console.is_terminal:
        console.print(view(ask(url, key, path)))
        return
    with Live(view(ask(url, key, path)), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(1.0)
            live.update(view(ask(url, key, path)), refresh=True)


def view(snapshot: dict[str, Any]) -> Group:
    """A snapshot as tables."""
    head = Text.assemble(
        ("omni-flow ", "bold"),
        (snapshot["status"], COLOURS.get(snapshot["status"], "red")),
        f"  {snapshot['live']} live, {snapshot['sessions']} sessions, up {snapshot['up_s']:.0f} s",
    )
    parts: list[Any] = [head]
    for graph in snapshot["graphs"]:
        rates = f"{graph['requests_per_s']:.1f} requests/s, {graph['failed_per_s']:.1f} failed/s, {graph['live']} live"
        parts.append(Text(f"\n{graph['name']}: {rates}", style="bold"))
        parts += [_replicas(graph), _interfaces(graph), _edges(graph)]
        if graph["memory"] is not None:
            parts.append(_memory(graph["memory"]))
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < 1 else "right", no_wrap=True)
    return table


def _replicas(graph: dict[str, Any]) -> Table:
    table = _table("replica", "state", "requests", "running", "buckets", "credit", "restarts", "last death")
    for role in graph["roles"]:
        for one in role["replicas"]:
            held = one["held"]
            numbers = (str(held.get(name, "–")) for name in ("requests", "running", "nodes", "open_numbers"))
            state = Text(one["state"], style=COLOURS.get(one["state"], "red"))
            table.add_row(one["place"], state, *numbers, str(one["restarts"]), one["cause"])
    return table


def _ms(value: float) -> str:
    return f"{value:.1f} ms" if value else "–"


def _interfaces(graph: dict[str, Any]) -> Table:
    table = _table("interface", "per s", "wait p50", "wait p95", "run p50", "run p95")
    for one in graph["interfaces"]:
        times = (_ms(one[name]) for name in ("wait_p50_ms", "wait_p95_ms", "run_p50_ms", "run_p95_ms"))
        table.add_row(one["name"], f"{one['per_s']:.1f}", *times)
    return table


def _memory(memory: dict[str, Any]) -> Table:
    table = _table("memory", "used", "of", "unit")
    for tier in memory["tiers"]:
        table.add_row(tier["name"], f"{tier['used']:,}", f"{tier['total']:,}" if tier["total"] else "–", tier["unit"])
    return table


def _edges(graph: dict[str, Any]) -> Table:
    table = _table("edge", "per s", "p50", "p95")
    for one in graph["edges"]:
        arrow = "⇒" if one["stream"] else "→"
        name = f"{one['field']} {arrow} {one['reader']}"
        table.add_row(name, f"{one['per_s']:.1f}", _ms(one["wait_p50_ms"]), _ms(one["wait_p95_ms"]))
    return table


def trace(request: str | None, url: str, key: str | None, as_json: bool) -> None:
    """Show the timeline of a request. Raises UserError."""
    if request is None:
        known = ask(url, key, "/v1/requests")["data"]
        if not known:
            raise UserError("the server has seen no request of yours yet")
        request = known[0]["id"]
    found = ask(url, key, f"/v1/requests/{request}")
    if as_json:
        print(json.dumps(found))
        return
    print(f"{found['id']}: {found['graph']} {found['endpoint']}, {found['outcome'] or 'running'}")
    for output, cause in found["failures"].items():
        print(f"  {output} failed: {cause}")
    spans = [Span(**span) for span in found["timeline"]]
    if spans:
        timeline.show(spans, sys.stdout)
    else:
        print("its activations were not noted: only those of some requests a second are (or send `timeline: true`)")
