"""What comes back from a request, as it comes: text on stdout, sound, pictures and arrays as files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

from omni_flow.cli.errors import UserError
from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.types import Audio, Bytes, Image, Type
from omni_flow.refs import ABSENT


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of an output before anything comes: its type, and whether it comes in several pieces."""

    type: Type | None
    streamed: bool


def kinds(graph: CompiledGraph) -> dict[str, Kind]:
    """The outputs a client receives."""
    types: dict[str, Any] = {o.field: o.type for i in graph.spec.interfaces for o in i.outputs}
    types.update((p.name, p.type) for p in graph.spec.placeholders)
    return {
        output.name: Kind(_as_type(types.get(graph.spec.outputs[output.name].field)), bool(output.scope))
        for output in graph.plan.outputs
        if not output.hidden
    }


def check_folder(folder: Path) -> None:
    """Raise UserError if no file can be written to `folder`, which need not be there yet."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    why = (
        "is no folder" if not place.is_dir() else "" if os.access(place, os.W_OK | os.X_OK) else "may not be written to"
    )
    if why:
        raise UserError(f"--out {folder}: {place} {why}", "name another folder")


class Show:
    """Takes (output, value) as they come, then `finish`.

    Args:
        outputs: from `kinds`.
        folder: where files go; made when the first is written.
        stream: where text goes; None keeps quiet.
    """

    def __init__(self, outputs: Mapping[str, Kind], folder: Path, stream: TextIO | None = None) -> None:
        self._outputs, self._folder, self._stream = outputs, folder, stream
        self._writers: dict[str, Any] = {}
        self._files: dict[str, list[Path]] = {}
        self._counts: dict[str, int] = {}
        self._line: str | None = None
        self.plain: dict[str, Any] = {}
        """What is no file, by output: a value, or a list of them where the output is streamed."""

    def __call__(self, name: str, value: Any) -> None:
        """One value. Raises UserError if a file can't be written."""
        kind = self._outputs[name]
        with self._writing():
            if isinstance(value, list) and value and _is_file(kind.type, value[0]):
                for item in value:
                    self._to_file(name, kind, item, several=True)
            elif _is_file(kind.type, value):
                self._to_file(name, kind, value, several=kind.streamed)
            else:
                self._to_text(name, kind, value)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{error.filename or self._folder}: {error.strerror}", "name a folder with --out"
            ) from error

    def finish(self) -> dict[str, Any]:
        """End the last line, close all files and say where they are. The result is what `--json` prints as outputs.

        Raises UserError if a file can't be written to its end; all are closed then too.
        """
        self._end_line()
        found = dict(self.plain)
        with self._writing(), contextlib.ExitStack() as closing:
            for writer in self._writers.values():
                closing.callback(writer.close)
        for name, paths in self._files.items():
            writer = self._writers.pop(name, None)
            about: dict[str, Any] = {"file": str(paths[0])} if len(paths) == 1 else {"files": [str(p) for p in paths]}
            text = str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1].name}"
            if hasattr(writer, "seconds"):
                about |= {"seconds": round(writer.seconds, 3), "rate": writer.rate}
                text = f"{writer.seconds:.1f} s of sound in {paths[0]}"
            self._say(f"{name}: {text}\n")
            found[name] = about
        return {name: found[name] for name in self._outputs if name in found}

    def _to_text(self, name: str, kind: Kind, value: Any) -> None:
        if value is ABSENT:
            return
        if kind.streamed:
            self.plain.setdefault(name, []).append(value)
        else:
            self.plain[name] = value
        text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=_plain).decode()
        label = f"{name}: " if len(self._outputs) > 1 else ""
        if kind.streamed and isinstance(value, str):
            if self._line != name:
                self._end_line()
                self._say(label)
                self._line = name
            self._say(text)
        else:
            self._end_line()
            self._say(f"{label}{text}\n")

    def _end_line(self) -> None:
        if self._line is not None:
            self._say("\n")
            self._line = None

    def _say(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()

    def _to_file(self, name: str, kind: Kind, value: Any, several: bool) -> None:
        if isinstance(kind.type, Audio) and kind.type.rate is not None:
            from omni_flow.cli.media import SoundWriter

            if name not in self._writers:
                self._writers[name] = SoundWriter(self._path(name, ".wav"), kind.type.rate)
            self._writers[name].write(value)
        elif isinstance(value, (bytes, bytearray, memoryview)):
            if name not in self._writers:
                self._writers[name] = self._path(name, ".bin").open("wb")
            self._writers[name].write(value)
        elif isinstance(kind.type, Image):
            from omni_flow.cli.media import write_picture

            write_picture(self._path(name, ".png", several), value)
        else:
            np.save(self._path(name, ".npy", several), _as_numpy(value))

    def _path(self, name: str, suffix: str, several: bool = False) -> Path:
        number = self._counts[name] = self._counts.get(name, -1) + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name.replace('/', '_')}{f'-{number}' if several else ''}{suffix}"
        self._files.setdefault(name, []).append(path)
        return path


def _as_type(declared: Any) -> Type | None:
    return declared if isinstance(declared, Type) else None


def _is_file(type_: Type | None, value: Any) -> bool:
    if isinstance(type_, Bytes) or isinstance(value, (bytes, bytearray, memoryview)):
        return value is not ABSENT
    return _is_array(value)


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _as_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    value = value.detach().cpu()
    return value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()


def _plain(value: Any) -> Any:
    """What msgspec can't write as JSON: pydantic models by their fields, arrays inside records by their shape."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return f"{type(value).__name__} of shape {tuple(value.shape)}" if _is_array(value) else repr(value)
