"""Bodies of the weight operations (0x60 to 0x6F) of the memory manager."""

from typing import Final

import msgspec

from omni_flow.data.weights.names import Family, ManifestEntry, TensorSpec

W_GET: Final = 0x60
W_SEAL: Final = 0x61
W_GIVE_UP: Final = 0x62
W_RELEASE: Final = 0x63
W_SWITCH: Final = 0x64
W_SUBSCRIBE: Final = 0x65
W_MANIFEST: Final = 0x66
W_SWITCHED: Final = 0x67
"""An event, to the sessions that have subscribed."""

MAX_SPECS: Final = 256
"""Tensors a message; clients split."""


def arena_name(segment: int) -> str:
    """Name under which a segment is mapped."""
    return f"weights/{segment}"


class WeightAsk(msgspec.Struct, array_like=True):
    """`version` None: the current one. `timeout_ms` bounds the wait for other loaders. `device`: the GPU, -1 for host
    memory."""

    family: Family
    specs: tuple[TensorSpec, ...]
    version: int | None
    timeout_ms: int
    device: int = -1


class WeightGrant(msgspec.Struct, array_like=True):
    """Load `specs[n]` to `offsets[n]` of the segment, then seal or give up."""

    token: int
    segment: int
    nbytes: int
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]


class WeightAnswer(msgspec.Struct, array_like=True):
    """What is there and held by the asker now, and what it has to load; the rest is to be asked for again."""

    version: int
    ready: tuple[ManifestEntry, ...]
    grant: WeightGrant | None


class WeightSeal(msgspec.Struct, array_like=True):
    token: int
    digests: tuple[bytes, ...]


class WeightSealed(msgspec.Struct, array_like=True):
    entries: tuple[ManifestEntry, ...]


class WeightGiveUp(msgspec.Struct, array_like=True):
    token: int
    reason: str


class WeightRelease(msgspec.Struct, array_like=True):
    segments: tuple[int, ...]


class WeightVersion(msgspec.Struct, array_like=True):
    """Request of a switch; reply to a subscription; the event."""

    family: Family
    version: int


class WeightFamily(msgspec.Struct, array_like=True):
    family: Family


class WeightManifest(msgspec.Struct, array_like=True):
    """`start`: the first entry wanted."""

    family: Family
    version: int | None
    start: int


class WeightManifestPage(msgspec.Struct, array_like=True):
    version: int
    total: int
    entries: tuple[ManifestEntry, ...]
