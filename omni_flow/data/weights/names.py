"""What a weight tensor is called everywhere, and what is recorded about it."""

import hashlib
import math
from typing import NewType

import msgspec
import xxhash

from omni_flow.data.errors import BadArgument

WeightKey = NewType("WeightKey", bytes)
"""32 bytes: SHA-256 of a name."""
ALIGNMENT = 256
"""Bytes to which tensors are aligned in a segment; enough for every vector load of CPU and GPU."""

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "u8": 1,
    "i8": 1,
    "f8_e4m3": 1,
    "f8_e5m2": 1,
    "i16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "i32": 4,
    "u32": 4,
    "f32": 4,
    "i64": 8,
    "u64": 8,
    "f64": 8,
}
"""Logical element types and their sizes."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """The weights that change version together: one revision of one model."""

    model: str
    revision: str

    def __str__(self) -> str:
        return f"{self.model}@{self.revision}"


class WeightName(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Universal name of one tensor as one process needs it. Two processes that give the same name mean the same bytes.

    Args:
        path: of the tensor in the model ("model.layers.3.mlp.up_proj.weight").
        quantisation: recipe, "" for none.
        layer: number of the layer, -1 when the tensor belongs to none.
        shard_axis, shard_index, shard_count: which part of which axis; -1, 0, 1 for the whole tensor.
        dtype: one of `ITEM_BYTES`.
        layout: what was done to the bytes after loading ("" for nothing): whatever changes them belongs here.
    """

    family: Family
    path: str
    dtype: str
    quantisation: str = ""
    layer: int = -1
    shard_axis: int = -1
    shard_index: int = 0
    shard_count: int = 1
    layout: str = ""

    def key(self) -> WeightKey:
        """SHA-256 of the tagged msgpack of all fields, which no two names share."""
        return WeightKey(hashlib.sha256(b"omni-flow weight 1" + msgspec.msgpack.encode(self)).digest())

    def key_on(self, device: int) -> WeightKey:
        """Key of the copy on a device (-1: in host memory); each device has its own."""
        key = self.key()
        return key if device < 0 else WeightKey(hashlib.sha256(b"omni-flow device %d" % device + key).digest())

    def check(self) -> None:
        """Raises: BadArgument, naming the field."""
        if self.dtype not in ITEM_BYTES:
            raise BadArgument(f"{self.path}: element type {self.dtype!r}", f"one of {', '.join(ITEM_BYTES)}")
        if not 0 <= self.shard_index < self.shard_count or (self.shard_count > 1) != (self.shard_axis >= 0):
            raise BadArgument(
                f"{self.path}: shard {self.shard_index} of {self.shard_count} on axis {self.shard_axis}",
                "index below count; axis -1 exactly when the count is 1",
            )


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A name and the shape of the tensor that has it (of the shard, not of the whole)."""

    name: WeightName
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.name.dtype] * math.prod(self.shape)

    def check(self) -> None:
        """Raises: BadArgument."""
        self.name.check()
        if min(self.shape, default=0) < 0 or self.nbytes >= 1 << 48:
            raise BadArgument(f"{self.name.path}: shape {self.shape}", "no negative extent, below 2^48 bytes")


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    """One sealed tensor: where it lies (`device`: the GPU, -1 for host memory) and the digest of its content."""

    spec: TensorSpec
    version: int
    segment: int
    offset: int
    digest: bytes
    device: int = -1


def content_digest(data: memoryview) -> bytes:
    """16 bytes, xxh3_128: detects rot and mistakes, not malice."""
    return xxhash.xxh3_128_digest(data)


def aligned(size: int) -> int:
    """`size` rounded up to the alignment of tensors in a segment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
