"""Where control and data meet: large arrays of messages lie in TempBuffers of the node's memory manager.

One `ArenaTensors` per process. Role code computes in place with `ctx.empty(shape, dtype)`; any other array is copied in
once, when it is given. Readers map the same memory read-only.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from omni_flow.control.arrays import is_torch
from omni_flow.control.runtime.tensors import Placed, TensorGone
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError, Disconnected, NeverFits, OutOfMemory, PoolFull, StaleEpoch
from omni_flow.data.ledger import TEMP_ARENA
from omni_flow.data.temp_client import Maps, Share, TempBuffer, TempClient
from omni_flow.refs import TensorRef

log = logging.getLogger("omni_flow.tensors")

RETRY_S = 0.2
"""How long a process goes on without a memory manager before it looks for one again."""

WARM_BYTES = 256 << 20
"""How much of the arena each process maps in at once; the pool hands out low addresses first."""


class ArenaTensors:
    """A process's TempBuffers, as the runtime and role code use them. Safe from any thread.

    Connects when the first large array comes; without a memory manager, arrays travel in messages.

    Args:
        address: the memory manager's socket.
        name: of this process, for people.
    """

    def __init__(self, address: str, name: str) -> None:
        self._address = address
        self._name = name
        self._client: MemoryManagerClient | None = None
        self._temp: TempClient | None = None
        self._retry_at = 0.0
        self._warm: threading.Thread | None = None
        self._lock = threading.RLock()  # a finalizer may run wherever memory is allocated, also under it
        self._made: dict[int, TempBuffer] = {}
        self.copied = 0
        self.in_place = 0

    @property
    def address(self) -> str:
        """The memory manager's socket, for connections of one's own."""
        return self._address

    def _connected(self) -> TempClient | None:
        """The pool; None while there is no memory manager (asked again after `RETRY_S`). Under the lock."""
        if self._temp is None and time.monotonic() >= self._retry_at:
            try:
                self._client = MemoryManagerClient(self._address, name=self._name)
                self._temp = TempClient(self._client)
            except DataError as error:
                self._retry_at = time.monotonic() + RETRY_S
                log.info("arrays travel in messages for now: %s", error)
                return None
            self._warm = threading.Thread(target=_map_in, args=(self._temp.buffers.maps,), name="warm", daemon=True)
            self._warm.start()
        return self._temp

    def empty(self, shape: tuple[int, ...] | int, dtype: DTypeLike = "float32") -> NDArray[Any]:
        """An array to compute into: given as an output, it is handed over without a copy.

        Once given it belongs to its readers and must not be written any more. Where the pool has no room it is ordinary
        memory.
        """
        kind = np.dtype(dtype)
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        buffer = self._alloc(math.prod(sizes) * kind.itemsize)
        if buffer is None:
            return np.empty(sizes, kind)
        array = buffer.numpy(sizes, kind)
        at = array.__array_interface__["data"][0]
        self._made[at] = buffer
        weakref.finalize(array, self._forgotten, at, buffer)
        return array

    def _forgotten(self, at: int, buffer: TempBuffer) -> None:
        """An array of `empty` died; if it was never given, its buffer is free."""
        with self._lock:
            if self._made.get(at) is buffer:
                del self._made[at]
                self.discard(buffer)

    def _alloc(self, nbytes: int) -> TempBuffer | None:
        with self._lock:
            temp = self._connected()
            if temp is None:
                return None
            try:
                buffer = temp.alloc(max(nbytes, 1), timeout=0)
            except (PoolFull, NeverFits):
                return None
            except (Disconnected, StaleEpoch) as gone:
                log.warning("arrays travel in messages for now: %s", gone)
                return None
        buffer.nbytes = nbytes
        return buffer

    # ---- what the runtime calls -----------------------------------------------------------------------------

    def place(self, array: Any) -> Placed | None:
        """See `Tensors.place`. A tensor on a device is not placed: it would be copied twice."""
        if is_torch(array):
            return self._place_torch(array)
        if array.dtype.hasobject:
            return None
        if array.flags.c_contiguous:
            buffer = self._take_made(array.__array_interface__["data"][0], array.nbytes)
            if buffer is not None:
                self.in_place += 1
                return ArenaPlaced(self, buffer, _name(array.dtype), array.shape)
        buffer = self._alloc(array.nbytes)
        if buffer is None:
            return None
        np.copyto(buffer.numpy(array.shape, array.dtype), array)
        self.copied += 1
        return ArenaPlaced(self, buffer, _name(array.dtype), array.shape)

    def _place_torch(self, tensor: Any) -> Placed | None:
        if tensor.device.type != "cpu":
            return None
        name = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        if tensor.is_contiguous():
            buffer = self._take_made(tensor.data_ptr(), tensor.nbytes)
            if buffer is not None:
                self.in_place += 1
                return ArenaPlaced(self, buffer, name, shape)
        buffer = self._alloc(tensor.nbytes)
        if buffer is None:
            return None
        buffer.torch(shape, tensor.dtype).copy_(tensor.detach())
        self.copied += 1
        return ArenaPlaced(self, buffer, name, shape)

    def _take_made(self, at: int, nbytes: int) -> TempBuffer | None:
        buffer = self._made.get(at)
        if buffer is None or nbytes > buffer.nbytes:
            return None
        del self._made[at]
        buffer.nbytes = nbytes
        return buffer

    def take(self, ref: TensorRef) -> ArenaTaken:
        """See `Tensors.take`."""
        with self._lock:
            temp = self._connected()
            if temp is None:
                raise TensorGone(f"there is no memory manager at {self._address}")
            if ref.node != temp.buffers.node:
                raise TensorGone(f"it lies on node {ref.node!r}, and this process is on {temp.buffers.node!r}")
            try:
                return ArenaTaken(temp.adopt(ref))
            except DataError as gone:
                raise TensorGone(str(gone)) from gone

    def settle(self, refs: Sequence[TensorRef]) -> None:
        """See `Tensors.settle`."""
        with self._lock:
            if self._temp is None:
                return
            try:
                self._temp.settle(refs)
            except (Disconnected, StaleEpoch):
                log.debug("the memory manager that held %d buffers is gone, and they with it", len(refs))

    def publish(self, buffer: TempBuffer, dtype: str, shape: tuple[int, ...], consumers: int) -> None:
        """Hand a buffer to so many readers."""
        with self._lock:
            if self._temp is not None:
                self._temp.publish(buffer, dtype, shape, consumers)

    def discard(self, buffer: TempBuffer) -> None:
        """A buffer nobody will read."""
        with self._lock:
            if self._temp is not None:
                self._temp.buffers.discard(buffer)

    def node(self) -> str:
        """The name of the node whose manager this is."""
        assert self._temp is not None
        return self._temp.buffers.node

    def close(self) -> None:
        """End the session; what it held is free."""
        if self._warm is not None:
            self._warm.join()
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._made.clear()
            self._client = self._temp = None
            self._retry_at = float("inf")


def _name(dtype: np.dtype[Any]) -> str:
    """The name of a type; numpy works it out anew each time."""
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = dtype.name
    return name


_names: dict[np.dtype[Any], str] = {}


def _map_in(maps: Maps) -> None:
    """Fault in the part of the arena that is used first, so that no request pays for it."""
    try:
        for arena in (maps.writer, maps.reader):
            if arena is not None:
                arena.populate(1, WARM_BYTES)
    except OutOfMemory as error:
        log.warning("%s", error)


class ArenaPlaced:
    """A buffer with an array in it, before its readers are known."""

    __slots__ = ("_buffer", "_tensors", "ref")

    def __init__(self, tensors: ArenaTensors, buffer: TempBuffer, dtype: str, shape: tuple[int, ...]) -> None:
        self.ref = TensorRef(tensors.node(), TEMP_ARENA, buffer.offset, buffer.nbytes, buffer.generation, dtype, shape)
        self._buffer = buffer
        self._tensors = tensors

    def publish(self, consumers: int) -> None:
        """See `Placed.publish`; with nobody to read it, it is discarded."""
        if consumers:
            self._tensors.publish(self._buffer, self.ref.dtype, self.ref.shape, consumers)
        else:
            self.discard()

    def discard(self) -> None:
        """See `Placed.discard`."""
        self._tensors.discard(self._buffer)


class ArenaTaken:
    """A reader's share of a buffer."""

    __slots__ = ("_share",)

    def __init__(self, share: Share) -> None:
        self._share = share

    def array(self, torch: bool) -> Any:
        """See `Taken.array`."""
        return self._share.torch() if torch else self._share.numpy()
