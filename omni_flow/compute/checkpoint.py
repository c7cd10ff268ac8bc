"""Looking at a checkpoint before a model is built from it: config, tensors, identity. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omni_flow.compute.errors import BadCheckpoint

FLOATS = frozenset({"F32", "BF16", "F16"})
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class TensorInfo(NamedTuple):
    """A tensor as a safetensors header describes it."""

    shape: tuple[int, ...]
    dtype: str
    file: str


def read_config(folder: str | Path) -> dict[str, Any]:
    """The checkpoint's config.json.

    Raises:
        BadCheckpoint: there is none, or it is no JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path}: {error}", "give the folder of a checkpoint in its official layout") from error
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{path} is no JSON object", "give the folder of a checkpoint in its official layout")
    return config


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadCheckpoint(f"{folder} has no .safetensors files", "give the folder of a checkpoint")
    return files


def read_tensors(folder: str | Path) -> dict[str, TensorInfo]:
    """All tensors of the checkpoint's safetensors files, from their headers alone.

    Raises:
        BadCheckpoint: no files, a broken header, or a name in two files.
    """
    found: dict[str, TensorInfo] = {}
    for path in _files(Path(folder)):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= 100 << 20:
                raise BadCheckpoint(f"{path} has no safetensors header", "fetch it again")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise BadCheckpoint(f"{path}: {error}", "fetch it again") from error
        size = path.stat().st_size - 8 - length
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in found:
                raise BadCheckpoint(f"{name} is in {found[name].file} and in {path.name}", "remove one of the files")
            if entry["data_offsets"][1] > size:
                raise BadCheckpoint(f"{path.name} ends before tensor {name} does", "fetch it again")
            found[name] = TensorInfo(tuple(entry["shape"]), entry["dtype"], path.name)
    return found


def check_tensors(folder: str | Path, expected: Mapping[str, tuple[int, ...]], unread: tuple[str, ...] = ()) -> None:
    """See that a checkpoint has exactly the tensors of its model.

    Args:
        expected: name → shape.
        unread: endings of names that it may have besides.

    Raises:
        BadCheckpoint: names what is missing, unknown, of another shape or not a float; the first few of each.
    """
    found = read_tensors(folder)
    wrong: list[str] = []

    def report(what: str, names: list[str]) -> None:
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            wrong.append(f"{what}: {', '.join(names[:5])}{more}")

    report("missing", sorted(set(expected) - set(found)))
    report("unknown", sorted(name for name in found if name not in expected and not name.endswith(unread)))
    both = sorted(set(found) & set(expected))
    report(
        "misshaped",
        [f"{n} is {found[n].shape}, not {tuple(expected[n])}" for n in both if found[n].shape != tuple(expected[n])],
    )
    report("of wrong dtype", [f"{n} is {found[n].dtype}" for n in both if found[n].dtype not in FLOATS])
    if wrong:
        raise BadCheckpoint(f"{folder} does not fit its config.json: {'; '.join(wrong)}", "give the model's own files")


def checkpoint_revision(folder: str | Path) -> str:
    """An identity of a checkpoint's content: its config, all headers, and samples of the data of each file.

    Fine-tuned weights differ everywhere, so samples tell them apart without reading hundreds of gigabytes.
    """
    folder = Path(folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in _files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for at in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * at // (_SAMPLES - 1), os.SEEK_SET)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
