"""A terse way to write specs in tests of the pure core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omni_flow.control.spec import (
    GraphSpec,
    InterfaceSpec,
    Join,
    OutputSpec,
    ParamSpec,
    PlaceholderSpec,
    SlotSpec,
    UseSpec,
)

Slots = Sequence[str | SlotSpec]


def slot(field: str, **options: Any) -> SlotSpec:
    """A slot whose parameter has the field's name."""
    return SlotSpec(field, options.pop("param", field), **options)


def collect(field: str, **options: Any) -> SlotSpec:
    return slot(field, join=Join.COLLECT, **options)


def last(field: str, **options: Any) -> SlotSpec:
    return slot(field, join=Join.LAST, **options)


def count(field: str, n: Any, **options: Any) -> SlotSpec:
    return slot(field, join=Join.COUNT, n=n, **options)


def window(field: str, size: int = 2, **options: Any) -> SlotSpec:
    return slot(field, join=Join.WINDOW, size=size, **{"stride": size, **options})


def optional(of: str | SlotSpec) -> SlotSpec:
    return replace(of if isinstance(of, SlotSpec) else slot(of), optional=True)


def interface(name: str, groups: Sequence[Slots], outputs: str = "", **options: Any) -> InterfaceSpec:
    """`outputs` is "x y*": a star marks a stream. Field names are those of the outputs."""
    made = tuple(OutputSpec(o.rstrip("*"), o.rstrip("*"), stream=o.endswith("*")) for o in outputs.split())
    slots = tuple(tuple(s if isinstance(s, SlotSpec) else slot(s) for s in group) for group in groups)
    return InterfaceSpec(name, options.pop("role", name), "run", slots, made, **options)


def graph(
    placeholders: str,
    *interfaces: InterfaceSpec,
    outputs: Mapping[str, str | SlotSpec] | None = None,
    feedback: Mapping[str, str | None] | None = None,
    params: str = "",
    uses: Sequence[UseSpec] = (),
) -> GraphSpec:
    """`placeholders` is "p q*"."""
    return GraphSpec(
        "g",
        placeholders=tuple(PlaceholderSpec(p.rstrip("*"), stream=p.endswith("*")) for p in placeholders.split()),
        params=tuple(ParamSpec(p) for p in params.split()),
        interfaces=interfaces,
        feedback=dict(feedback or {}),
        outputs={k: v if isinstance(v, SlotSpec) else slot(v) for k, v in (outputs or {}).items()},
        uses=tuple(uses),
    )
