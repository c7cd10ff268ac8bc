"""The activations of a request as a table with bars: what ran when, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table

from omni_flow.control.runtime.live_request import Span

BAR = 32
MOST_ROWS = 60


def as_rows(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Plain rows in the order of their starts; times in seconds since the first was queued."""
    zero = min((span.queued for span in spans), default=0.0)
    return [
        {
            "interface": span.interface,
            "path": span.path,
            "replica": span.replica,
            "queued_s": round(span.queued - zero, 6),
            "started_s": round(span.started - zero, 6),
            "ended_s": round(span.ended - zero, 6),
            "note": span.note,
        }
        for span in sorted(spans, key=lambda span: (span.started, span.queued))
    ]


def show(spans: Sequence[Span], stream: TextIO) -> None:
    """Print the table, at most MOST_ROWS of it, and below what roles said of their activations."""
    rows = as_rows(spans)
    zero, end = min((s.queued for s in spans), default=0.0), max((s.ended for s in spans), default=0.0)
    scale = BAR / max(end - zero, 1e-9)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("activation", "replica"):
        table.add_column(name, overflow="fold")
    for name in ("queued", "started", "ended"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"· waits, █ runs, {end - zero:.2f} s in all", no_wrap=True, min_width=BAR)
    shown = sorted(spans, key=lambda span: (span.started, span.queued))[:MOST_ROWS]
    for span in shown:
        waits, runs, ends = (int((t - zero) * scale) for t in (span.queued, span.started, span.ended))
        bar = " " * waits + "·" * (runs - waits) + "█" * max(1, ends - runs)
        times = (f"{t - zero:.3f} s" for t in (span.queued, span.started, span.ended))
        table.add_row(_name(span), span.replica, *times, bar[: BAR + 1])
    out = Console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else 132)
    out.print(table)
    for span in shown:
        if span.note:
            out.print(f"{_name(span)}: {span.note}")
    if len(rows) > MOST_ROWS:
        out.print(f"… {len(rows) - MOST_ROWS} more; --json has them all")


def _name(span: Span) -> str:
    return f"{span.interface}[{span.path}]" if span.path else span.interface
