"""Stand-ins for roles: seeded behaviour that needs nothing but the graph.

Each output is a value, absent or failed, each stream 0 to 8 frames (fewer inside other streams, so that nested graphs
stay small). What is given is a pure function of interface, inputs and seed, as the theorem asks of roles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import xxhash

from omni_flow.control.spec import GraphSpec, OutputSpec
from omni_flow.control.types import Type
from omni_flow.testing.facts import Activation, Given
from omni_flow.testing.typed import value_for

MOST_FRAMES = (8, 4, 3)
"""Frames of a stream at most, by the number of sources around its interface (the last number holds beyond)."""


@dataclass(frozen=True, slots=True)
class HashCut:
    """A window policy for tests: cuts behind frames whose hash is a multiple of `modulus`, and at `max_frames`."""

    max_frames: int = 3
    modulus: int = 2

    def cut(self, frames: Sequence[Any], start: int, ended: bool) -> int | None:
        for index in range(start, min(len(frames), start + self.max_frames)):
            if stable_hash(frames[index]) % self.modulus == 0:
                return index + 1
        return start + self.max_frames if len(frames) - start >= self.max_frames else None


class Standins:
    """Behaviour of every role of a graph. Call it with an activation.

    Args:
        absent: chance that a single output has no value.
        failed: chance that an activation raises, at a place of its own in what it gives.
    """

    def __init__(self, spec: GraphSpec, seed: int, *, absent: float = 0.12, failed: float = 0.03) -> None:
        self._outputs: Mapping[str, tuple[OutputSpec, ...]] = {i.name: i.outputs for i in spec.interfaces}
        self._seed = seed
        self._absent = absent
        self._failed = failed

    def __call__(self, activation: Activation) -> Given:
        inputs = sorted(activation.inputs.items())
        draw = Random(stable_hash((self._seed, activation.interface, inputs)))
        gives: list[tuple[str, Any]] = []
        for output in self._outputs[activation.interface]:
            if output.stream:
                most = MOST_FRAMES[min(len(activation.path), len(MOST_FRAMES) - 1)]
                gives += [(output.name, value_of(draw, output.type)) for _ in range(draw.randint(0, most))]
            elif draw.random() >= self._absent:
                gives.append((output.name, value_of(draw, output.type)))
        draw.shuffle(gives)
        if draw.random() < self._failed:
            return Given(gives[: draw.randint(0, len(gives))], raises=True)
        return Given(gives)


class Functions:
    """Behaviour as plain functions, for small graphs: interface → function of the inputs by parameter name.

    A function returns what is given in order, as `[(output, value), ...]`, or a `Given`. What it raises is a mistake of
    the test, not of the role: say `Given(..., raises=True)` for a role that raises.
    """

    def __init__(self, **functions: Callable[..., Given | Sequence[tuple[str, Any]]]) -> None:
        self._functions = functions

    def __call__(self, activation: Activation) -> Given:
        given = self._functions[activation.interface](**activation.inputs)
        return given if isinstance(given, Given) else Given(given)


def value_of(draw: Random, type_: Any = None) -> Any:
    """A value of `type_`, where one is declared and can be made.

    Else often a small number (it may serve as the `n` of a count), rarely a string (which may not).
    """
    if isinstance(type_, Type) and (value := value_for(type_, draw)) is not None:
        return value
    kind = draw.random()
    if kind < 0.6:
        return draw.randrange(1000)
    return draw.randrange(5) if kind < 0.97 else f"s{draw.randrange(1000)}"


def stable_hash(value: Any) -> int:
    """A hash of a value's printed form, the same in every process."""
    return xxhash.xxh64_intdigest(repr(value).encode())
