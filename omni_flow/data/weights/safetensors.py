"""Checkpoints in safetensors files, read straight into shared memory.

A file is u64 header length, JSON header, data. Whole tensors and shards of the first axis are read by `preadv` into
their place; shards of other axes are copied once, from the mapped file.
"""

import itertools
import math
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from omni_flow.data.errors import BadArgument, DataError, UnknownName
from omni_flow.data.weights.names import ITEM_BYTES, Family, TensorSpec, WeightName

_DTYPES: Final[dict[str, str]] = {
    "BOOL": "bool",
    "U8": "u8",
    "I8": "i8",
    "F8_E4M3": "f8_e4m3",
    "F8_E5M2": "f8_e5m2",
    "I16": "i16",
    "U16": "u16",
    "F16": "f16",
    "BF16": "bf16",
    "I32": "i32",
    "U32": "u32",
    "F32": "f32",
    "I64": "i64",
    "U64": "u64",
    "F64": "f64",
}
_MAX_HEADER: Final = 100 << 20
_PIECE: Final = 64 << 20
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class BadCheckpoint(DataError):
    """A file that is not safetensors, or contradicts itself or its index; the message names it."""

    code = "bad-checkpoint"


class _Info(msgspec.Struct):
    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where a tensor lies: `offset` counts from the begin of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, FileTensor]:
    """The tensors of one file. Raises: BadCheckpoint, OSError."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise BadCheckpoint(f"{file}: a header of {length} bytes in a file of {size}", "is it safetensors?")
        raw = stream.read(length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        infos = {name: msgspec.json.decode(info, type=_Info) for name, info in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadCheckpoint(f"{file}: its header is not of the format: {error}", "download it again") from error
    return {name: _tensor(file, name, info, 8 + length, size) for name, info in infos.items()}


def _tensor(file: Path, name: str, info: _Info, base: int, size: int) -> FileTensor:
    begin, end = info.data_offsets
    dtype = _DTYPES.get(info.dtype)
    if dtype is None:
        raise BadCheckpoint(f"{file}: tensor {name} has element type {info.dtype!r}", "convert it")
    nbytes = ITEM_BYTES[dtype] * math.prod(info.shape)
    if end - begin != nbytes or base + end > size:
        raise BadCheckpoint(
            f"{file}: tensor {name} of {nbytes} bytes lies at {begin}:{end} of a file of {size}", "download it again"
        )
    return FileTensor(file, dtype, info.shape, base + begin, nbytes)


class Checkpoint:
    """The tensors of one file, or of a directory with a `model.safetensors.index.json` or single files.

    Raises: BadCheckpoint when the index and the files disagree, UnknownName when there are none.
    """

    def __init__(self, path: str | Path, family: Family) -> None:
        self.path = Path(path)
        self.family = family
        self.tensors: dict[str, FileTensor] = {}
        index = self.path / "model.safetensors.index.json"
        if self.path.is_file():
            self.tensors = read_header(self.path)
        elif index.is_file():
            self._read_index(index)
        else:
            for file in sorted(self.path.glob("*.safetensors")):
                self.tensors |= read_header(file)
        if not self.tensors:
            raise UnknownName(f"no safetensors at {self.path}", "give a file or the directory of a checkpoint")

    def _read_index(self, index: Path) -> None:
        try:
            where = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadCheckpoint(f"{index}: no weight_map: {error}", "download it again") from error
        for name in sorted(set(where.values())):
            # An index is data of others: a file name in it must not lead elsewhere.
            if Path(name).name != name:
                raise BadCheckpoint(f"{index}: names the file {name!r} outside its directory")
            found = read_header(self.path / name)
            self.tensors |= {tensor: place for tensor, place in found.items() if where.get(tensor) == name}
        lacking = sorted(set(where) - set(self.tensors))
        if lacking:
            raise BadCheckpoint(f"{index}: {len(lacking)} tensors are in no file, as {lacking[0]}", "download again")

    def spec(self, path: str, *, axis: int = -1, index: int = 0, count: int = 1, quantisation: str = "") -> TensorSpec:
        """Name and shape of a tensor or of one shard of it; the layer is read off the path ("….layers.7.…").

        Raises: UnknownName; BadArgument when the axis cannot be cut into `count` equal parts.
        """
        found = self.tensors.get(path)
        if found is None:
            raise UnknownName(f"tensor {path} is not in {self.path}")
        shape = list(found.shape)
        if count > 1:
            if not 0 <= axis < len(shape) or shape[axis] % count:
                raise BadArgument(f"{path}: axis {axis} of {found.shape} in {count} parts", "choose another axis")
            shape[axis] //= count
        parts = path.split(".")
        numbers = [int(b) for a, b in itertools.pairwise(parts) if a == "layers" and b.isdecimal()]
        name = WeightName(
            family=self.family,
            path=path,
            dtype=found.dtype,
            quantisation=quantisation,
            layer=numbers[0] if numbers else -1,
            shard_axis=axis if count > 1 else -1,
            shard_index=index,
            shard_count=count,
        )
        name.check()
        return TensorSpec(name, tuple(shape))

    def specs(self, paths: Sequence[str] | None = None) -> list[TensorSpec]:
        """Whole tensors: those named, or all, in the order of the files so that a load reads ahead."""
        order = sorted(self.tensors.items(), key=lambda item: (item[1].file, item[1].offset))
        return [self.spec(path) for path in (paths if paths is not None else [path for path, _ in order])]

    def load(self, spec: TensorSpec, out: memoryview) -> None:
        """A `Loader`: fill `out` with the tensor or shard that the spec names. Raises: BadCheckpoint, UnknownName."""
        name = spec.name
        found = self.tensors.get(name.path)
        if found is None:
            raise UnknownName(f"tensor {name.path} is not in {self.path}")
        if name.shard_count > 1 and math.prod(found.shape[: name.shard_axis]) != 1:
            _copy_strided(found, name, out)
            return
        with found.file.open("rb", buffering=0) as stream:
            offset, done = found.offset + name.shard_index * len(out), 0
            if name.shard_count * len(out) != found.nbytes:
                raise BadCheckpoint(f"{name.path}: {len(out)} bytes asked for, the file has {found.nbytes}")
            while done < len(out):
                got = os.preadv(stream.fileno(), [out[done : done + _PIECE]], offset + done)
                if not got:
                    raise BadCheckpoint(f"{found.file}: ends within {name.path}", "download it again")
                done += got


def _copy_strided(found: FileTensor, name: WeightName, out: memoryview) -> None:
    axis, item = name.shard_axis, ITEM_BYTES[found.dtype]
    rows = math.prod(found.shape[:axis])
    width = math.prod(found.shape[axis:]) * item
    part = width // name.shard_count
    begin = found.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with found.file.open("rb") as stream:
        mapped = mmap.mmap(
            stream.fileno(), found.offset + found.nbytes - begin, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin
        )
    source = np.ndarray((rows, width), np.uint8, mapped, found.offset - begin)
    target = np.frombuffer(out, np.uint8).reshape(rows, part)
    np.copyto(target, source[:, name.shard_index * part : (name.shard_index + 1) * part])
