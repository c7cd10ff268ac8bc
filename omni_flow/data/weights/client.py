"""`WeightClient`: get weights that the node holds once, loading what is missing."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.data import cuda
from omni_flow.data.arena import Arena, available_bytes
from omni_flow.data.arguments import real, whole
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.device_arena import DeviceArena
from omni_flow.data.errors import BadArgument, DataError, OutOfMemory, UnknownName
from omni_flow.data.protocol import Message
from omni_flow.data.weights import messages as m
from omni_flow.data.weights.errors import LoaderKeepsView as LoaderKeepsView
from omni_flow.data.weights.errors import LoadingElsewhere as LoadingElsewhere
from omni_flow.data.weights.errors import SwitchRefused as SwitchRefused
from omni_flow.data.weights.names import Family, ManifestEntry, TensorSpec, WeightKey, WeightName, content_digest

if TYPE_CHECKING:
    import torch

Loader = Callable[[TensorSpec, memoryview], None]
"""Fills the bytes of one tensor, in place, and keeps no view of them."""

_MARGIN_S: Final = 10.0
_NUMPY: Final[dict[str, str]] = {
    "bool": "?",
    "u8": "u1",
    "i8": "i1",
    "i16": "i2",
    "u16": "u2",
    "f16": "f2",
    "i32": "i4",
    "u32": "u4",
    "f32": "f4",
    "i64": "i8",
    "u64": "u8",
    "f64": "f8",
}
_TORCH: Final[dict[str, str]] = {
    "bool": "bool",
    "u8": "uint8",
    "i8": "int8",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "i16": "int16",
    "u16": "uint16",
    "f16": "float16",
    "bf16": "bfloat16",
    "i32": "int32",
    "u32": "uint32",
    "f32": "float32",
    "i64": "int64",
    "u64": "uint64",
    "f64": "float64",
}


class WeightSet:
    """Tensors of one version, mapped read-only. The memory stays while this process maps it; `release` tells the
    manager that it may go when the mappings have gone. Iterates over the names."""

    def __init__(self, owner: "WeightClient", version: int) -> None:
        self.version = version
        self.epoch = owner.client.epoch
        self.loaded: list[WeightName] = []
        self._owner = owner
        self._entries: dict[WeightKey, ManifestEntry] = {}
        self._arenas: dict[int, Arena | DeviceArena] = {}
        self._holds: list[int] = []

    def __iter__(self) -> Iterator[WeightName]:
        return (entry.spec.name for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: WeightName) -> ManifestEntry:
        """Raises: UnknownName when it was not asked for."""
        found = self._entries.get(name.key())
        if found is None:
            raise UnknownName(f"{name.path} is not in this set of {len(self)} weights")
        return found

    def bytes(self, name: WeightName) -> memoryview:
        """The tensor's bytes, read-only; of a tensor on a device a copy."""
        entry = self.entry(name)
        arena = self._arenas[entry.segment]
        if isinstance(arena, DeviceArena):
            return arena.read(entry.offset, entry.spec.nbytes).data.toreadonly()
        return arena.view(entry.offset, entry.spec.nbytes)

    def numpy(self, name: WeightName) -> NDArray[Any]:
        """A read-only array over the shared memory. Raises: BadArgument for an element type that numpy lacks, or a
        tensor on a device."""
        entry = self.entry(name)
        kind = _NUMPY.get(name.dtype)
        if kind is None:
            raise BadArgument(f"numpy has no {name.dtype} for {name.path}", "use torch() or bytes()")
        arena = self._arenas[entry.segment]
        if isinstance(arena, DeviceArena):
            raise BadArgument(f"{name.path} lies on device {arena.device}", "use torch(), or bytes() for a copy")
        return arena.numpy(entry.offset, entry.spec.shape, np.dtype(kind))

    def torch(self, name: WeightName) -> "torch.Tensor":
        """A tensor over the shared memory; see `Arena.torch` on writing to it. On a device a kernel that writes there
        fails."""
        import torch

        entry = self.entry(name)
        kind: torch.dtype = getattr(torch, _TORCH[name.dtype])
        return self._arenas[entry.segment].torch(entry.offset, entry.spec.shape, kind)

    def verify(self) -> list[WeightName]:
        """Names of the tensors whose bytes are not those that were sealed; empty when all are right."""
        return [name for name in self if content_digest(self.bytes(name)) != self.entry(name).digest]

    def release(self) -> None:
        """Hold nothing any more. Arrays that are still in use keep working in this process; not so tensors on a device
        whose memory is shared by CUDA IPC."""
        self._entries.clear()
        self._arenas.clear()
        holds, self._holds = self._holds, []
        # A manager that was started anew knows nothing of these holds.
        if holds and self.epoch == self._owner.client.epoch:
            for at in range(0, len(holds), 1024):
                self._owner.client.call(m.W_RELEASE, m.WeightRelease(tuple(holds[at : at + 1024])))

    def __enter__(self) -> "WeightSet":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def add(self, entries: Sequence[ManifestEntry]) -> None:
        """Map the segments of entries that one reply has made this session hold."""
        segments = sorted({entry.segment for entry in entries})
        self._holds += segments
        for segment in segments:
            if segment not in self._arenas:
                self._arenas[segment] = self._owner.map(segment)
        for entry in entries:
            self._entries[entry.spec.name.key()] = entry


class WeightClient:
    """Weight calls of one client of the memory manager; like it, for one thread at a time."""

    def __init__(self, client: MemoryManagerClient) -> None:
        self.client = client
        self._on_switch: dict[Family, Callable[[Family, int], None]] = {}
        self._other_events = client.on_event

    def get(
        self,
        specs: TensorSpec | Sequence[TensorSpec],
        loader: Loader,
        *,
        version: int | None = None,
        device: int = -1,
        timeout_s: float = 600.0,
    ) -> WeightSet:
        """Tensors of one family, all of one version, mapped read-only.

        Those nobody has loaded are loaded here, by `loader`, straight into the shared memory; those that others are
        loading are waited for, and taken over when their loader dies or gives up.

        Args: `version`: None for the current one; a higher one stages it beside the current until `switch`.
        `device`: the GPU to hold them on, -1 for host memory; the loader fills host memory all the same, one tensor at
        a time, which goes to the device from there.
        `timeout_s`: bounds each wait for another loader.

        Raises: LoadingElsewhere, OutOfMemory, LoaderKeepsView, BadArgument, or what `loader` raises. Nothing is held
        then.
        """
        wanted = [specs] if isinstance(specs, TensorSpec) else list(specs)
        if not wanted or not all(isinstance(spec, TensorSpec) for spec in wanted):
            raise BadArgument(f"specs: {brief(specs)}", "give at least one TensorSpec, and nothing else")
        if not callable(loader):
            raise BadArgument(f"loader: {brief(loader)}", "give a function of a TensorSpec and a memoryview")
        version = version if version is None else whole("version", version)
        device, timeout_s = whole("device", device, -1, 1 << 16), real("timeout_s", timeout_s)
        found: WeightSet | None = None
        try:
            for at in range(0, len(wanted), m.MAX_SPECS):
                batch = wanted[at : at + m.MAX_SPECS]
                while batch:
                    asked = found.version if found else version
                    answer = self._ask(batch[0].name.family, batch, asked, timeout_s, device)
                    found = found or WeightSet(self, answer.version)
                    if answer.grant:
                        found.loaded += [spec.name for spec in answer.grant.specs]
                    found.add(answer.ready)
                    if answer.grant:
                        found.add(self._load(answer.grant, loader, device))
                    batch = [spec for spec in batch if spec.name not in _names(answer)]
        except BaseException:
            if found:
                found.release()
            raise
        if found is None:
            raise AssertionError("a get of at least one tensor has an answer")
        return found

    def switch(self, family: Family, version: int) -> int:
        """Make a staged version the current one, in one step; returns the one it replaces. Subscribers are told; new
        KV namespaces carry the new number. Raises: SwitchRefused, Refused."""
        body = m.WeightVersion(_family(family), whole("version", version))
        return self.client.call(m.W_SWITCH, body).body(m.WeightVersion).version

    def subscribe(self, family: Family, on_switch: Callable[[Family, int], None]) -> int:
        """Be told of every switch from now on; returns the current version. `on_switch` runs whenever this client
        receives, so in the middle of other calls: it should only note the number."""
        if not callable(on_switch):
            raise BadArgument(f"on_switch: {brief(on_switch)}", "give a function of a Family and a number")
        self._on_switch[_family(family)] = on_switch
        self.client.on_event = self._event
        return self.client.call(m.W_SUBSCRIBE, m.WeightFamily(family)).body(m.WeightVersion).version

    def manifest(self, family: Family, version: int | None = None) -> list[ManifestEntry]:
        """All sealed tensors of a version (None: the current one) with the digests of their contents."""
        version = version if version is None else whole("version", version)
        entries: list[ManifestEntry] = []
        while True:
            ask = m.WeightManifest(_family(family), version, len(entries))
            page = self.client.call(m.W_MANIFEST, ask).body(m.WeightManifestPage)
            entries += page.entries
            version = page.version
            if len(entries) >= page.total or not page.entries:
                return entries

    def map(self, segment: int, *, write: bool = False) -> Arena | DeviceArena:
        """A mapping of a segment that this session holds, or loads; for reading it goes with its last view."""
        name = m.arena_name(segment)
        info, fd = self.client.descriptor(name, write=write)
        if info.device >= 0:
            on_device = DeviceArena.attach(info, fd, write=write)
            on_device.close()
            if not write:
                on_device.unmap_with_last_view()
            return on_device
        arena = Arena.attach(name, fd, info.size, write=write, page_size=info.page_size)
        arena.close()
        return arena

    def _ask(
        self, family: Family, specs: Sequence[TensorSpec], version: int | None, timeout_s: float, device: int
    ) -> m.WeightAnswer:
        ask = m.WeightAsk(family, tuple(specs), version, int(timeout_s * 1000), device)
        return self.client.call(m.W_GET, ask, timeout=timeout_s + _MARGIN_S).body(m.WeightAnswer)

    def _load(self, grant: m.WeightGrant, loader: Loader, device: int) -> tuple[ManifestEntry, ...]:
        try:
            digests = self._fill_device(grant, loader) if device >= 0 else self._fill(grant, loader)
            seal = m.WeightSeal(grant.token, tuple(digests))
            return self.client.call(m.W_SEAL, seal).body(m.WeightSealed).entries
        except BaseException as error:
            self._give_up(grant, error)
            raise

    def _fill(self, grant: m.WeightGrant, loader: Loader) -> list[bytes]:
        there = available_bytes()
        if grant.nbytes > there:
            raise OutOfMemory(f"weights of {grant.nbytes} bytes, {there} are available", "free memory, or load fewer")
        arena = self.map(grant.segment, write=True)
        assert isinstance(arena, Arena)
        arena.populate()
        digests = []
        for spec, offset in zip(grant.specs, grant.offsets, strict=True):
            view = arena.view(offset, spec.nbytes)
            loader(spec, view)
            digests.append(content_digest(view))
        return digests

    def _fill_device(self, grant: m.WeightGrant, loader: Loader) -> list[bytes]:
        """By way of pinned host memory for one tensor. The writable mapping is gone when it returns."""
        arena = self.map(grant.segment, write=True)
        assert isinstance(arena, DeviceArena)
        digests = []
        try:
            with _pinned(max(spec.nbytes for spec in grant.specs)) as room:
                for spec, offset in zip(grant.specs, grant.offsets, strict=True):
                    part = room[: spec.nbytes]
                    loader(spec, part.data)
                    digests.append(content_digest(part.data))
                    if spec.nbytes:
                        arena.write(offset, part)
        finally:
            arena.unmap()
        return digests

    def _give_up(self, grant: m.WeightGrant, why: BaseException) -> None:
        # A manager that is gone, or was started anew, has no grant to take back; the caller gets `why`.
        with contextlib.suppress(DataError):
            self.client.call(m.W_GIVE_UP, m.WeightGiveUp(grant.token, repr(why)[:500]))

    def _event(self, message: Message) -> None:
        if message.op == m.W_SWITCHED:
            body = message.body(m.WeightVersion)
            told = self._on_switch.get(body.family)
            if told:
                told(body.family, body.version)
        elif self._other_events:
            self._other_events(message)


@contextlib.contextmanager
def _pinned(size: int) -> Iterator[NDArray[np.uint8]]:
    """Host memory the device copies from at full speed; pageable where CUDA won't pin it."""
    room = np.empty(max(size, 1), np.uint8)
    pinned = cuda.register_host(room.ctypes.data, room.nbytes) == 0
    try:
        yield room
    finally:
        if pinned:
            cuda.unregister_host(room.ctypes.data)


def _family(family: object) -> Family:
    if not isinstance(family, Family):
        raise BadArgument(f"family: {brief(family)}", "give a Family")
    return family


def _names(answer: m.WeightAnswer) -> set[WeightName]:
    names = {entry.spec.name for entry in answer.ready}
    return names | {spec.name for spec in answer.grant.specs} if answer.grant else names
