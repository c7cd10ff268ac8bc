"""The flags that a graph's placeholders become, and `name=value` pairs of the fixed flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_flow.cli import values
from omni_flow.cli.errors import UserError, did_you_mean
from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.spec import PlaceholderSpec
from omni_flow.control.types import Type


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of one placeholder. `name` is `--NAME`, or `--input-NAME` where the command has such a flag itself."""

    name: str
    placeholder: PlaceholderSpec

    @property
    def type(self) -> Type | None:
        """The placeholder's type."""
        return self.placeholder.type if isinstance(self.placeholder.type, Type) else None

    @property
    def metavar(self) -> str:
        """What to write in its place, for `--help`."""
        return values.metavar(self.type, self.placeholder.stream)

    @property
    def help(self) -> str:
        """What to give, for `--help`."""
        text = values.describe(self.type, self.placeholder.stream)
        return f"{text[0].upper()}{text[1:]}.{' Required.' if self.placeholder.required else ''}"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a request sends: whole values at once, and streams frame by frame."""

    whole: Mapping[str, Any]
    streams: Mapping[str, Iterator[Any]]


def flags_of(graph: CompiledGraph, taken: Iterable[str]) -> tuple[Flag, ...]:
    """A flag for each placeholder, in declared order; `taken` are the command's own flags."""
    own = set(taken)
    return tuple(Flag(f"--input-{name}" if f"--{name}" in own else f"--{name}", placeholder)
                 for name, placeholder in graph.placeholders.items())  # fmt: skip


def read_inputs(flags: Sequence[Flag], given: Sequence[str | None]) -> Inputs:
    """The values of all flags. A streamed placeholder that is not given is an empty stream.

    Raises UserError: a required one is missing, none is given, two read stdin, or a value is none of its type.
    """
    pairs = list(zip(flags, given, strict=True))
    missing = [flag.name for flag, text in pairs if text is None and flag.placeholder.required]
    if missing:
        raise UserError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} required", _usage(flags))
    if flags and all(text is None for text in given):
        raise UserError("nothing to send", _usage(flags))
    reading = [flag.name for flag, text in pairs if text == values.STDIN]
    if len(reading) > 1:
        raise UserError(f"{' and '.join(reading)} both read stdin", "give all but one of them otherwise")
    whole: dict[str, Any] = {}
    streams: dict[str, Iterator[Any]] = {}
    for flag, text in pairs:
        if flag.placeholder.stream:
            streams[flag.placeholder.name] = iter(()) if text is None else values.frames(flag.name, flag.type, text)
        elif text is not None:
            whole[flag.placeholder.name] = values.read(flag.name, flag.type, text)
    return Inputs(whole, streams)


def read_params(graph: CompiledGraph, given: Sequence[str]) -> dict[str, Any]:
    """The params of `--param name=value`. Raises UserError."""
    found: dict[str, Any] = {}
    for name, text in _pairs("--param", given):
        if name not in graph.params:
            raise _unknown("--param", name, "param", graph.params)
        declared = graph.params[name].type
        found[name] = values.parse(f"--param {name}", declared if isinstance(declared, Type) else None, text)
    return found


def read_replicas(graph: CompiledGraph, given: Sequence[str]) -> dict[str, int]:
    """The numbers of `--replicas role=n`. Raises UserError."""
    found: dict[str, int] = {}
    for role, text in _pairs("--replicas", given):
        if role not in graph.roles:
            raise _unknown("--replicas", role, "role", graph.roles)
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"--replicas {role}: expected a number of at least 1, got {text!r}")
        found[role] = int(text)
    return found


def _pairs(flag: str, given: Sequence[str]) -> Iterator[tuple[str, str]]:
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UserError(f"{flag}: expected name=value, got {pair!r}")
        yield name, text


def _unknown(flag: str, name: str, kind: str, known: Iterable[str]) -> UserError:
    hint = did_you_mean(name, known) or f"it has no {kind}"
    return UserError(f"{flag}: the graph has no {kind} {name!r}", hint)


def _usage(flags: Sequence[Flag]) -> str:
    return f"give {'' if len(flags) == 1 else 'one or more of '}" + ", ".join(f"{f.name} {f.metavar}" for f in flags)
