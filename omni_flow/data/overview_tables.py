"""`omni-flow memory inspect` as tables: sessions, tiers, TempBuffers, weights, jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
_NUMBERS: Final = frozenset(("session", "pid", "job", "mover"))
"""Columns whose numbers are names."""


def tables(seen: Mapping[str, Any]) -> Iterator[Table]:
    """What `inspect` prints; `seen` is what it gives as JSON. Nothing is shown of what there is none of."""
    yield _table("sessions", [_session(row) for row in seen["sessions"]])
    yield from _some("KV pages", seen.get("pools", ()))
    if temp := seen.get("temp"):
        title = f"TempBuffers: {temp['free_bytes']:,} of {temp['bytes']:,} bytes free"
        yield _table(title, temp["slots"])
        without = temp["without_owner"]
        if without["slots"]:
            row = {**without, "held_by": _pairs("session", without["held_by"])}
            yield _table("TempBuffers whose producer has gone or settled them", [row])
    yield from _some("weights", seen.get("weights", ()))
    yield from _some("tensors", seen.get("tensors", ()))
    yield from _some("jobs under way", seen.get("jobs", ()))
    yield from _some("asked for", seen.get("fetches", ()))


def _session(row: Row) -> Row:
    """A session's line: what each service knows of it in words."""
    shown = {name: row[name] for name in ("session", "pid", "name", "role")}
    shown["pages (reserved, pinned)"] = _pairs("", ((pool, f"{r}, {p}") for pool, (r, p) in row["held"].items()))
    shown["TempBuffers"] = _words(row.get("temp", {}))
    shown["weights"] = _words(row.get("weights", {}))
    shown["kept (leases, pages)"] = _pairs("", ((pool, f"{n}, {p}") for pool, (n, p) in row.get("kept", {}).items()))
    shown["jobs"] = row.get("jobs", "")
    return shown


def _words(held: Row) -> str:
    return ", ".join(f"{value:,} {name}" for name, value in held.items())


def _pairs(what: str, pairs: Any) -> str:
    return "; ".join(f"{what} {name}: {value}".strip() for name, value in pairs)


def _some(title: str, rows: Sequence[Row]) -> Iterator[Table]:
    if rows:
        yield _table(title, rows)


def _table(title: str, rows: Sequence[Row]) -> Table:
    names = list(rows[0]) if rows else []
    table = Table(*(name.replace("_", " ") for name in names), title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in names))
    return table


def _cell(name: str, value: object) -> Text:
    return plain(f"{value:,}" if type(value) is int and name not in _NUMBERS else str(value))


def plain(text: str) -> Text:
    """What others call themselves, as it is: nothing in it is markup, or moves the cursor."""
    return Text("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))
