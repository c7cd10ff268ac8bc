"""The words of the proof: facts, activations, what a role gives, and what a request comes to.

The reference interpreter, the stand-ins and the simulator speak of these; they hold no behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

Path = tuple[tuple[str, int], ...]
Scope = tuple[str, ...]
End = tuple[int, bool]


class Fact(NamedTuple):
    """What is said of one field at one path; `value` has a meaning for kind "value" only."""

    kind: Literal["value", "absent", "failed"]
    value: Any = None


ABSENT_FACT: Final = Fact("absent")
FAILED_FACT: Final = Fact("failed")


@dataclass(frozen=True, slots=True)
class Activation:
    """One call of an interface, as a role sees it. `iteration` counts in the innermost loop around it."""

    interface: str
    path: Path
    group: int
    inputs: Mapping[str, Any]
    params: Mapping[str, Any]
    iteration: int = 0
    last_iteration: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """What a role does in one activation: outputs in the order they are given, then a return or an exception.

    A value `ABSENT` says that the output, or that frame of a stream, has no value.
    """

    gives: Sequence[tuple[str, Any]] = ()
    raises: bool = False


Behave = Callable[[Activation], Given]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What the client receives of one output: values in path order, up to the first failure."""

    values: tuple[Any, ...] = ()
    failed: bool = False


class Run(NamedTuple):
    """How an activation ran: by which group, with which inputs."""

    group: int
    inputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """All that a request comes to. `hidden` are the outputs of interfaces that have none of their own."""

    outputs: Mapping[str, Delivered]
    hidden: Mapping[str, Delivered]
    outcome: Literal["done", "failed"]
    runs: Mapping[tuple[str, Path], Run]
    facts: Mapping[tuple[str, Path], Fact]
    ends: Mapping[tuple[str, Path], End]
    start_order: Mapping[str, Sequence[Path]]


def show_path(path: Path) -> str:
    """A path as logs print it: `y#0/W@win#1`."""
    return "/".join(f"{source}#{number}" for source, number in path)
