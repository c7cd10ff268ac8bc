"""Where control and data meet: large arrays of messages lie in TempBuffers of the node's memory manager.

One `ArenaTensors` per process. Role code computes in place with `ctx.empty(shape, dtype)`; what it was given and gives
on as it is keeps its place; any other array is copied in once, when it is given. Readers map the same memory read-only.
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

from omni_flow.control.arrays import is_torch, itemsize, torch_module
from omni_flow.control.runtime.tensors import Placed, TensorGone
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import CallTimeout, DataError, Disconnected, NeverFits, OutOfMemory, PoolFull, StaleEpoch
from omni_flow.data.ledger import ORDERED
from omni_flow.data.temp_arrays import Share, TempBuffer
from omni_flow.data.temp_buffers import TempBuffers
from omni_flow.data.temp_client import TempClient
from omni_flow.data.temp_shares import Maps
from omni_flow.deploy.errands import Errands
from omni_flow.refs import TensorRef

log = logging.getLogger("omni_flow.tensors")

RETRY_S = 0.2
"""How long a process goes on without a memory manager before it looks for one again."""

ANSWER_S = 10.0
"""How long a memory manager may take to answer, which keeps an event loop: less than a replica may stall."""

SILENT_S = 30.0
"""How long a process goes on without a memory manager that has not answered."""

WARM_BYTES = 256 << 20
"""How much of the arena each process maps in at once; the pool hands out low addresses first."""


class ArenaTensors:
    """A process's TempBuffers, as the runtime and role code use them. `empty` from any thread, the rest on the loop.

    Connects when the first large array comes; without a memory manager, and on a machine other than x86-64 (see
    `ledger.py`), arrays travel in messages.

    Args:
        address: the memory manager's socket.
        name: of this process, for people.
    """

    def __init__(self, address: str, name: str) -> None:
        self._address = address
        self._name = name
        self._client: MemoryManagerClient | None = None
        self._temp: TempClient | None = None
        self._attended: TempClient | None = None
        """The pool, once the loop does its errands."""
        self._errands: Errands | None = None
        self._retry_at = 0.0 if ORDERED else float("inf")
        self._warm: threading.Thread | None = None
        self._lock = threading.Lock()
        self._under_tensors: dict[int, weakref.ref[_Made | Share]] = {}
        """By address, for tensors don't say what they lie on."""
        self.copied = 0
        self.in_place = 0
        self.forwarded = 0

    @property
    def address(self) -> str:
        """The memory manager's socket, for connections of one's own."""
        return self._address

    # ---- the connection -------------------------------------------------------------------------------------

    def _connected(self) -> TempClient | None:
        """The pool; None while there is no memory manager (asked again after `RETRY_S`)."""
        if self._temp is None and time.monotonic() >= self._retry_at:
            with self._lock:
                if self._temp is None:
                    self._connect()
        return self._temp

    def _connect(self) -> None:
        errands = Errands(self._lose)
        try:
            client = MemoryManagerClient(self._address, name=self._name, timeout=ANSWER_S)
            temp = TempClient(client, bell=errands.ring_soon, direct=True)
        except DataError as error:
            self._retry_at = time.monotonic() + _pause(error)
            log.info("arrays travel in messages for now: %s", error)
            return
        self._client, self._errands, self._temp = client, errands, temp
        self._warm = threading.Thread(target=_map_in, args=(temp.buffers.maps,), name="warm", daemon=True)
        self._warm.start()

    def _on_loop(self) -> TempClient | None:
        """The pool, for a caller on the loop, which does its errands from now on."""
        temp = self._temp or self._connected()
        errands, client = self._errands, self._client
        if temp is not None and errands is not None and not errands.started and client is not None:
            errands.start(client, temp)
            self._attended = temp
        return temp

    def _lose(self, why: DataError | None = None) -> None:
        """The server is gone, or does not answer, so that nobody knows what this connection has there: what lay there
        is void, and another connection is tried in a while. Any thread."""
        with self._lock:
            self._retry_at = max(self._retry_at, time.monotonic() + _pause(why))
            temp, self._temp, self._attended = self._temp, None, None
            if temp is not None:
                temp.buffers.die()
            if self._errands is not None:
                self._errands.stop()
            if self._client is not None:
                self._client.close()
            self._client = self._errands = None

    def close(self) -> None:
        """End the session; what it held is free."""
        self._retry_at = float("inf")
        if self._warm is not None:
            self._warm.join()
        self._lose()

    # ---- for role code --------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...] | int, dtype: DTypeLike = "float32") -> NDArray[Any]:
        """An array to compute into: given as an output, it is handed over without a copy. Any thread.

        Once given it belongs to its readers and must not be written any more. Where the pool has no room it is ordinary
        memory.
        """
        kind = np.dtype(dtype)
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        temp = self._temp or self._connected()
        buffer = None if temp is None or _name(kind) is None else self._alloc(temp, math.prod(sizes) * kind.itemsize)
        if temp is None or buffer is None:
            return np.empty(sizes, kind)
        made = _Made(temp.buffers, buffer, sizes, kind.str)
        if torch_module() is not None:
            self._under_tensors[made.address] = weakref.ref(made)
        return np.asarray(made)

    def _alloc(self, temp: TempClient, nbytes: int) -> TempBuffer | None:
        buffer = temp.buffers.pop(nbytes or 1)
        if buffer is None:
            try:
                buffer = temp.alloc(nbytes or 1, timeout=0)
            except (PoolFull, NeverFits):
                return None
            except (Disconnected, StaleEpoch, CallTimeout) as gone:
                log.warning("arrays travel in messages for now: %s", gone)
                self._lose(gone)
                return None
        buffer.nbytes = nbytes
        return buffer

    # ---- what the runtime calls -----------------------------------------------------------------------------

    def place(self, array: Any) -> Placed | None:
        """See `Tensors.place`. A tensor on a device is not placed: it would be copied twice."""
        if type(array) is not np.ndarray and is_torch(array):
            return self._place_torch(array)
        temp = self._attended or self._on_loop()
        dtype = array.dtype
        name = _name(dtype)
        if temp is None or name is None:
            return None
        if array.base is not None and dtype.isnative:
            placed = self._as_it_lies(temp, _under(array), array.nbytes, name, array.shape)
            if placed is not None:
                return placed
        buffer = self._alloc(temp, array.nbytes)
        if buffer is None:
            return None
        np.copyto(buffer.numpy(array.shape, dtype.newbyteorder("=")), array)
        self.copied += 1
        return ArenaPlaced(temp.buffers, buffer, name, array.shape)

    def _place_torch(self, tensor: Any) -> Placed | None:
        temp = self._attended or self._on_loop()
        name = str(tensor.dtype).removeprefix("torch.")
        if temp is None or tensor.device.type != "cpu":
            return None
        shape = tuple(tensor.shape)
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():  # those are views that compute
            known = self._under_tensors.get(tensor.data_ptr())
            placed = self._as_it_lies(temp, known and known(), tensor.nbytes, name, shape)
            if placed is not None:
                return placed
        buffer = self._alloc(temp, tensor.nbytes)
        if buffer is None:
            return None
        buffer.torch(shape, tensor.dtype).copy_(tensor.detach())
        self.copied += 1
        return ArenaPlaced(temp.buffers, buffer, name, shape)

    def _as_it_lies(
        self, temp: TempClient, owner: object, nbytes: int, dtype: str, shape: tuple[int, ...]
    ) -> Placed | None:
        """An array that is the head of a buffer made by `empty`, or the whole of one that was received: no copy."""
        if type(owner) is _Made:
            buffer = owner.take(temp.buffers, nbytes)
            if buffer is not None:
                self.in_place += 1
                return ArenaPlaced(temp.buffers, buffer, dtype, shape)
        elif (
            type(owner) is Share
            and owner.ref.nbytes == nbytes
            and temp.buffers.holds(owner)
            and temp.buffers.book_forward()  # else it is copied: the loop waits for nobody
        ):
            self.forwarded += 1
            return ArenaForwarded(temp.buffers, owner, dtype, shape)
        return None

    def take(self, ref: TensorRef) -> Share:
        """See `Tensors.take`."""
        temp = self._attended or self._on_loop()
        if temp is None:
            raise TensorGone(f"there is no memory manager at {self._address}")
        buffers = temp.buffers
        if ref.node != buffers.node:
            raise TensorGone(f"it lies on node {ref.node!r}, and this process is on {buffers.node!r}")
        try:
            try:
                share = buffers.adopt(ref)
            except PoolFull:  # one round trip, for what the bell has not told yet
                share = temp.adopt(ref)
        except PoolFull as full:
            raise TensorGone(f"{self._name} can hold no more: {full}") from full
        except DataError as gone:
            raise TensorGone(str(gone)) from gone
        if torch_module() is not None:
            self._under_tensors[buffers.reader_address + ref.offset] = weakref.ref(share)
        return share

    def settle(self, refs: Sequence[TensorRef]) -> None:
        """See `Tensors.settle`."""
        if self._temp is None:
            return
        try:
            self._temp.settle(refs)
        except (Disconnected, StaleEpoch, CallTimeout) as gone:
            log.debug("the memory manager that held %d buffers is gone, and they with it: %s", len(refs), gone)
            if isinstance(gone, CallTimeout):
                self._lose(gone)


def _pause(error: DataError | None) -> float:
    return SILENT_S if isinstance(error, CallTimeout) else RETRY_S


def _under(array: NDArray[Any]) -> object:
    """What an array lies on, if it begins where that does and is whole in itself."""
    owner: object = array.base
    if owner is None or not array.flags.c_contiguous:
        return None
    while type(owner) is np.ndarray:
        owner = owner.base
    if type(owner) is _Made and owner.nbytes != array.nbytes and owner.address != array.ctypes.data:
        return None
    return owner


def _name(dtype: np.dtype[Any]) -> str | None:
    """The name that readers know a type of elements by; None for what is not one of numbers."""
    name = _names.get(dtype, "")
    if name == "":
        known = itemsize(dtype.name) is not None
        name = _names[dtype] = dtype.name if known else None  # numpy works it out anew each time
    return name


_names: dict[np.dtype[Any], str | None] = {}


def _map_in(maps: Maps) -> None:
    """Fault in the part of the arena that is used first, so that no request pays for it."""
    try:
        for arena in (maps.writer, maps.reader):
            if arena is not None:
                arena.populate(1, WARM_BYTES)
    except OutOfMemory as error:
        log.warning("%s", error)


class _Made:
    """The memory of an array from `empty`: a slot that is free again if the array goes without having been given."""

    __slots__ = ("__array_interface__", "__weakref__", "_buffer", "_buffers", "address")

    def __init__(self, buffers: TempBuffers, buffer: TempBuffer, shape: tuple[int, ...], typestr: str) -> None:
        self._buffers = buffers
        self._buffer: TempBuffer | None = buffer
        self.address = buffers.writer_address + buffer.offset
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": typestr, "data": (self.address, False)}

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def take(self, buffers: TempBuffers, nbytes: int) -> TempBuffer | None:
        """The slot, once, to hand over its first bytes in the pool of `buffers`."""
        buffer = self._buffer
        if buffer is None or nbytes > buffer.nbytes or self._buffers is not buffers:
            return None
        self._buffer = None
        buffer.nbytes = nbytes
        return buffer

    def __del__(self) -> None:
        if self._buffer is not None:
            self._buffers.discard(self._buffer)


class ArenaPlaced:
    """A buffer with an array in it, before its readers are known."""

    __slots__ = ("_buffer", "_buffers", "ref")

    def __init__(self, buffers: TempBuffers, buffer: TempBuffer, dtype: str, shape: tuple[int, ...]) -> None:
        self.ref = buffers.describe(buffer, dtype, shape)
        self._buffer = buffer
        self._buffers = buffers

    def publish(self, consumers: int) -> None:
        """See `Placed.publish`; with nobody to read it, it is discarded."""
        if consumers:
            self._buffers.hand_over(self._buffer, consumers)
        else:
            self.discard()

    def discard(self) -> None:
        """See `Placed.discard`."""
        self._buffers.discard(self._buffer)


class ArenaForwarded:
    """A buffer that was received and is given on as it is."""

    __slots__ = ("_buffers", "_share", "ref")

    def __init__(self, buffers: TempBuffers, share: Share, dtype: str, shape: tuple[int, ...]) -> None:
        """Room in the ledger has been booked."""
        got = share.ref
        self.ref = TensorRef(got.node, got.arena, got.offset, got.nbytes, got.generation, dtype, shape)
        self._buffers = buffers
        self._share: Share | None = share

    def publish(self, consumers: int) -> None:
        """See `Placed.publish`. Our own share may go once theirs are written down."""
        share = self._share
        self.discard()
        if consumers and share is not None:
            try:
                self._buffers.forward(share, consumers)
            except DataError as gone:
                log.warning("readers will not find an array: %s", gone)

    def discard(self) -> None:
        """See `Placed.discard`."""
        if self._share is not None:
            self._share = None
            self._buffers.unbook_forward()
