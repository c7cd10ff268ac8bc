"""From what stands after a flag to the value of a field: by the field's type, text itself or what a path holds."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from omni_flow.cli.errors import UserError
from omni_flow.control.types import (
    KV,
    Anything,
    Audio,
    Bytes,
    Image,
    Json,
    ListOf,
    OneOf,
    Record,
    Scalar,
    Tensor,
    Text,
    Tokens,
    Type,
    is_pydantic,
)

STDIN = "-"
CHUNK_S = 0.1
"""Seconds of sound in one frame of a streamed placeholder."""
CHUNK_BYTES = 64 * 1024
"""Bytes in one frame of a streamed placeholder of bytes."""


def describe(type_: Type | None, stream: bool) -> str:
    """What to give for a field, for `--help`."""
    if isinstance(type_, Audio):
        kind = "a sound file (WAV, FLAC, OGG, MP3)"
    elif isinstance(type_, Image):
        kind = "a folder of pictures" if stream else "a picture file (PNG, JPEG, WebP)"
    elif isinstance(type_, Text):
        kind = f"a text file, or {STDIN} for stdin" if stream else f"text, or {STDIN} for stdin"
    elif isinstance(type_, Bytes):
        kind = f"a file, or {STDIN} for stdin"
    elif isinstance(type_, Tensor):
        kind = "an .npy file"
    else:
        shown = "JSON" if type_ is None or isinstance(type_, Anything) else f"{type_} as JSON"
        kind = (
            f"a file of JSON lines, each {shown}, or {STDIN} for stdin" if stream else f"{shown}, or {STDIN} for stdin"
        )
    if not stream:
        return kind
    how = {Audio: f"{CHUNK_S:g} s at a time", Text: "line by line", Tensor: "row by row"}.get(type(type_), "")
    return f"{kind}, sent {how}" if how else f"{kind}, sent one by one"


def metavar(type_: Type | None, stream: bool) -> str:
    """The placeholder word of the flag in `--help`."""
    if isinstance(type_, Image) and stream:
        return "FOLDER"
    if stream or isinstance(type_, (Audio, Image, Bytes, Tensor)):
        return "FILE"
    return "TEXT" if isinstance(type_, Text) else "VALUE"


def read(flag: str, type_: Type | None, given: str) -> Any:
    """The value of a field of `type_` from what was given. Raises UserError naming `flag`."""
    if isinstance(type_, Text):
        return _stdin_text(flag) if given == STDIN else given
    if isinstance(type_, Audio):
        return _media(flag).read_sound(Path(given), type_.rate)
    if isinstance(type_, Image):
        return _media(flag).read_picture(Path(given))
    if isinstance(type_, Bytes):
        return sys.stdin.buffer.read() if given == STDIN else _bytes(flag, given)
    if isinstance(type_, Tensor):
        return _checked(flag, type_, _array(flag, given))
    return parse(flag, type_, _stdin_text(flag) if given == STDIN else given)


def frames(flag: str, type_: Type | None, given: str) -> Iterator[Any]:
    """The frames of a streamed field of `type_`, read as they are asked for; what is wrong at once raises at once."""
    return _checked_frames(flag, type_, _frames(flag, type_, given))


def parse(flag: str, type_: Type | None, given: str) -> Any:
    """A value written as JSON; text needs no quotes where the type is text or open. Raises UserError."""
    if isinstance(type_, Text):
        return given
    if isinstance(type_, OneOf):
        return _first_that_fits(flag, type_, given)
    if isinstance(type_, KV):
        raise UserError(f"{flag}: a KV cache can't be given on the command line", "use the Python client")
    if isinstance(type_, Tokens) and not given.lstrip().startswith("["):
        given = f"[{given}]"
    try:
        value = json.loads(given)
    except ValueError as error:
        if type_ is None or isinstance(type_, Anything):
            return given
        expected = "JSON" if isinstance(type_, Json) else f"{type_} as JSON"
        raise UserError(f"{flag}: expected {expected}, got {given!r}", f"{error}") from None
    if isinstance(type_, Record):
        return _record(flag, type_, value)
    if isinstance(type_, ListOf) and isinstance(type_.item, Record) and isinstance(value, list):
        return [_record(flag, type_.item, item) for item in value]
    if isinstance(type_, Scalar) and type_.kind is float and type(value) is int:
        value = float(value)
    return _checked(flag, type_, value)


def _frames(flag: str, type_: Type | None, given: str) -> Iterator[Any]:
    if isinstance(type_, Audio):
        samples = _media(flag).read_sound(Path(given), type_.rate)
        return _cut(samples, max(1, int((type_.rate or 16_000) * CHUNK_S)))
    if isinstance(type_, Image):
        return _pictures(flag, Path(given))
    if isinstance(type_, Bytes):
        source = sys.stdin.buffer if given == STDIN else io.BytesIO(_bytes(flag, given))
        return iter(lambda: source.read(CHUNK_BYTES), b"")
    if isinstance(type_, Tensor):
        return iter(_array(flag, given))
    lines = sys.stdin if given == STDIN else io.StringIO(_text(flag, given))
    texts = (line.rstrip("\r\n") for line in lines)
    if isinstance(type_, Text):
        return texts
    return (parse(flag, type_, line) for line in texts if line.strip())


def _checked_frames(flag: str, type_: Type | None, found: Iterator[Any]) -> Iterator[Any]:
    for number, value in enumerate(found):
        yield _checked(f"{flag}, frame {number}", type_, value)


def _cut(samples: Any, size: int) -> Iterator[Any]:
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def _pictures(flag: str, path: Path) -> Iterator[Any]:
    media = _media(flag)
    if not path.is_dir():
        return iter([media.read_picture(path)])
    files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    if not files:
        raise UserError(f"{flag}: {path} holds no file", "give a folder of pictures, or one picture")
    return (media.read_picture(file) for file in files)


def _checked(flag: str, type_: Type | None, value: Any) -> Any:
    wrong = type_.mismatch(value) if type_ is not None else None
    if wrong is not None:
        raise UserError(f"{flag}: {wrong}")
    return value


def _first_that_fits(flag: str, type_: OneOf, given: str) -> Any:
    # Text fits whatever is given, so it comes last.
    for option in sorted(type_.options, key=lambda option: isinstance(option, Text)):
        try:
            return read(flag, option, given)
        except UserError:
            continue
    raise UserError(f"{flag}: expected {type_}, got {given!r}")


def _record(flag: str, type_: Record, value: Any) -> Any:
    kind: Any = type_.kind
    make: Callable[[Any], Any] = kind.model_validate if is_pydantic(kind) else lambda v: msgspec.convert(v, kind)
    try:
        return make(value)
    except ValueError as error:  # what both msgspec and pydantic raise for a value that doesn't fit
        raise UserError(f"{flag}: no {type_}: {error}") from error


def _array(flag: str, given: str) -> Any:
    try:
        return np.load(given, allow_pickle=False)
    except OSError as error:
        raise UserError(f"{flag}: {given}: {error.strerror or error}", "give an .npy file") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{flag}: {given} is no .npy file: {error}", "write it with numpy.save") from error


def _bytes(flag: str, given: str) -> bytes:
    try:
        return Path(given).read_bytes()
    except OSError as error:
        raise UserError(f"{flag}: {given}: {error.strerror}", "check the path") from error


def _text(flag: str, given: str) -> str:
    try:
        return _bytes(flag, given).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}: {given} is no UTF-8 text ({error.reason} at byte {error.start})") from error


def _stdin_text(flag: str) -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}: stdin is no UTF-8 text ({error.reason} at byte {error.start})") from error


def _media(flag: str) -> ModuleType:
    try:
        from omni_flow.cli import media
    except ImportError as error:
        raise UserError(
            f"{flag}: reading sound and pictures needs {error.name}", "pip install 'omni-flow[media]'"
        ) from error
    return media
