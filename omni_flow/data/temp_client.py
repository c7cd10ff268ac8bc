"""TempBuffers in a role process: allocate, compute in place, publish, adopt, release; the server is asked once per
magazine.

`TempBuffers` knows no socket: it says which leases it needs. `TempClient` and `AsyncTempClient` fetch them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from omni_flow.data.arena import Arena
from omni_flow.data.errors import BadArgument, PoolFull, Refused, StaleDescriptor
from omni_flow.data.ledger import (
    BLOCK,
    CELLS,
    HELD,
    HELD_ENTRIES,
    LEASED,
    MAX_FANOUT,
    NONE,
    OWNED,
    PUBLISHED,
    RELEASED,
    TEMP_ARENA,
)
from omni_flow.data.messages import TempLease, TempLeased, TempRetract
from omni_flow.data.protocol import Message, Op
from omni_flow.refs import TensorRef

if TYPE_CHECKING:
    import torch

    from omni_flow.data.client import MemoryManagerClient

BATCH: Final = 64
RING_BYTES: Final = 2 << 20
_MAGAZINE_BYTES: Final = 8 << 20
_HELD_BASE: Final = OWNED * CELLS


class Maps(NamedTuple):
    """The four mappings the pool needs; `writer` is None for a read-only session."""

    writer: Arena | None
    reader: Arena
    generations: Arena
    ledger: Arena

    def populate(self) -> None:
        """Fault the mappings of the buffers in."""
        for arena in (self.writer, self.reader):
            if arena is not None:
                arena.populate()


class TempBuffer:
    """A slot of one's own: compute into `view`, `numpy` or `torch`, then publish it."""

    __slots__ = ("_arena", "entry", "generation", "nbytes", "offset", "size", "slot")

    def __init__(self, arena: Arena, entry: int, slot: int, generation: int, size: int, nbytes: int) -> None:
        self._arena = arena
        self.entry = entry
        self.slot = slot
        self.generation = generation
        self.size = size
        self.nbytes = nbytes
        self.offset = slot * BLOCK

    def view(self) -> memoryview:
        return self._arena.view(self.offset, self.nbytes)

    def numpy(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return self._arena.numpy(self.offset, shape, dtype)

    def torch(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._arena.torch(self.offset, shape, dtype)


class Share:
    """A consumer's share of a published buffer; goes back when the last array over it does, or by `release`."""

    __slots__ = ("__weakref__", "_entry", "_owner", "ref")

    def __init__(self, owner: TempBuffers, entry: int, ref: TensorRef) -> None:
        self._owner: TempBuffers | None = owner
        self._entry = entry
        self.ref = ref

    @property
    def __array_interface__(self) -> dict[str, Any]:
        owner = self._owner
        if owner is None:
            raise StaleDescriptor(f"slot at {self.ref.offset} has been released", "adopt once per use")
        return {
            "version": 3,
            "shape": (self.ref.nbytes,),
            "typestr": "|u1",
            "data": (owner.reader_address + self.ref.offset, True),
        }

    def view(self) -> memoryview:
        """The bytes, read-only; valid until `release`."""
        owner = self._owner
        if owner is None:
            raise StaleDescriptor(f"slot at {self.ref.offset} has been released", "adopt once per use")
        return owner.maps.reader.view(self.ref.offset, self.ref.nbytes)

    def numpy(self) -> NDArray[Any]:
        """A read-only array that keeps the share for as long as it, or any view of it, lives."""
        flat = np.asarray(self)
        return flat.view(_dtype(self.ref.dtype)).reshape(self.ref.shape)

    def torch(self) -> torch.Tensor:
        """A tensor that keeps the share; writing through it is a segmentation fault."""
        import warnings

        import torch

        kind = getattr(torch, self.ref.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(np.asarray(self))
        return flat.view(kind).reshape(self.ref.shape)

    def valid(self) -> bool:
        """Whether the slot still is the one described: to be asked after reading without trust in the producer."""
        owner = self._owner
        return owner is not None and owner.generation_of(self.ref.offset // BLOCK) == self.ref.generation

    def release(self) -> None:
        """Give the share back now. Arrays over it must not be read any more."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.give(self._entry, self.ref.nbytes)

    def __del__(self) -> None:
        self.release()


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        if name == "bfloat16":
            return np.dtype(np.uint16)
        raise BadArgument(f"numpy has no type {name!r}", "read the buffer as a tensor") from None


class TempBuffers:
    """Magazines and ledger of one client; no calls."""

    def __init__(self, maps: Maps, node: str) -> None:
        self.maps = maps
        self.node = node
        self.reader_address = maps.reader.address
        self._cells = maps.ledger.view(0, maps.ledger.size).cast("I")
        self._generations = maps.generations.view(0, maps.generations.size // 4 * 4).cast("I")
        self._magazines: dict[int, list[tuple[int, int, int, int]]] = {}
        self._free_held = list(range(_HELD_BASE + (HELD_ENTRIES - 1) * CELLS, _HELD_BASE - 1, -CELLS))
        self.pending = 0
        self.pending_bytes = 0
        self.dead = False

    @staticmethod
    def magazine(nbytes: int) -> tuple[int, int]:
        """Class of a request and how many slots of it to lease at once."""
        order = max(0, (nbytes - 1).bit_length() - 12)
        return order, max(1, min(BATCH, _MAGAZINE_BYTES >> (order + 12)))

    def pop(self, nbytes: int) -> TempBuffer | None:
        """A slot from the magazine, None when it must be filled first."""
        arena = self.maps.writer
        if arena is None:
            raise Refused("a read-only session makes no buffers", "connect without read_only")
        if nbytes < 1:
            raise BadArgument(f"a buffer of {nbytes} bytes", "at least one")
        order = max(0, (nbytes - 1).bit_length() - 12)
        magazine = self._magazines.get(order)
        if magazine:
            entry, slot, generation, size = magazine.pop()
            if size >= nbytes:
                return TempBuffer(arena, entry, slot, generation, size, nbytes)
            magazine.append((entry, slot, generation, size))
        return None

    def fill(self, order: int, size: int, entries: Sequence[tuple[int, int, int]]) -> None:
        """Put leased slots of one size into the magazine."""
        self._magazines.setdefault(order, []).extend((*entry, size) for entry in entries)

    def discard(self, buffer: TempBuffer) -> None:
        """Put an unpublished buffer back into the magazine."""
        order = max(0, (buffer.size - 1).bit_length() - 12)
        self._magazines.setdefault(order, []).append((buffer.entry, buffer.slot, buffer.generation, buffer.size))

    def drain(self) -> list[int]:
        """Empty the magazines; the entries are to be returned to the server."""
        entries = [slot[0] for magazine in self._magazines.values() for slot in magazine]
        self._magazines.clear()
        return entries

    def publish(self, buffer: TempBuffer, dtype: str, shape: tuple[int, ...], consumers: int = 1) -> TensorRef:
        """Hand a buffer over to `consumers` readers; its content must not change from now on.

        Returns:
            the descriptor to send them, by any channel; at most 128 bytes encoded.
        """
        if not 1 <= consumers <= MAX_FANOUT:
            raise BadArgument(f"{consumers} consumers", f"1 to {MAX_FANOUT}")
        cells = self._cells
        at = buffer.entry * CELLS
        if cells[at] != LEASED or cells[at + 2] != buffer.slot:
            raise StaleDescriptor(f"slot {buffer.slot} is not leased by this client", "publish a buffer once")
        cells[at + 1] = consumers
        cells[at] = PUBLISHED
        return TensorRef(self.node, TEMP_ARENA, buffer.offset, buffer.nbytes, buffer.generation, dtype, shape)

    def adopt(self, ref: TensorRef, shares: int = 1) -> Share:
        """Take a share of a published buffer of this node.

        Raises:
            StaleDescriptor: the slot is no longer the one described.
        """
        slot = ref.offset // BLOCK
        if ref.offset % BLOCK or slot >= len(self._generations) or ref.offset + ref.nbytes > self.maps.reader.size:
            raise StaleDescriptor(f"{ref.nbytes} bytes at {ref.offset} lie outside the arena", "is it of this node?")
        try:
            at = self._free_held.pop()
        except IndexError:
            at = self._find_entry()
        cells = self._cells
        cells[at + 1] = shares
        cells[at + 2] = slot
        cells[at + 3] = ref.generation
        cells[at] = HELD
        if self._generations[slot] != ref.generation:
            cells[at] = NONE
            self._free_held.append(at)
            raise StaleDescriptor(
                f"slot {slot} has generation {self._generations[slot]}, the descriptor {ref.generation}",
                "its producer or the server has taken it back",
            )
        return Share(self, at, ref)

    def _find_entry(self) -> int:
        """An entry the server has emptied since.

        Raises:
            PoolFull: as many shares are held as the ledger has entries.
        """
        states = np.frombuffer(self._cells, np.uint32).reshape(-1, CELLS)[OWNED:, 0]
        free = (np.flatnonzero(states == NONE) * CELLS + _HELD_BASE).tolist()
        if not free:
            raise PoolFull(f"this client holds or has just released {HELD_ENTRIES} shares", "release some, then flush")
        self._free_held = free
        return self._free_held.pop()

    def give(self, at: int, nbytes: int) -> None:
        """Mark a share as released; any thread."""
        if not self.dead:
            self._cells[at] = RELEASED
            self.pending += 1
            self.pending_bytes += nbytes

    @property
    def should_ring(self) -> bool:
        """Whether enough has come back to tell the server: many shares, or much memory, which is best used again while
        it is mapped and warm.
        """
        return self.pending >= BATCH or self.pending_bytes >= RING_BYTES

    def rung(self) -> None:
        """The server looks into the ledger now."""
        self.pending = self.pending_bytes = 0

    def generation_of(self, slot: int) -> int:
        return self._generations[slot]


def lease_body(nbytes: int, count: int, timeout: float) -> TempLease:
    return TempLease(nbytes, count, int(timeout * 1000))


def leased_of(reply: Message) -> tuple[int, list[tuple[int, int, int]]]:
    """Size of the slots and (entry, slot, generation) of each."""
    entries, slots, generations = (reply.column(i, "<u4").tolist() for i in range(3))
    return reply.body(TempLeased).size, list(zip(entries, slots, generations, strict=True))


def copy_in(buffer: TempBuffer, array: NDArray[Any]) -> None:
    """Copy a numpy array into a buffer."""
    np.copyto(buffer.numpy(array.shape, array.dtype), array)


class TempClient:
    """TempBuffers over a blocking client.

    `alloc`, `adopt` and `flush` belong to the client's thread; shares may be released from any.

    Args:
        populate: fault this process's mappings in now (some 0.5 s per GiB); else each page costs a fault at its
        first use.
    """

    def __init__(self, client: MemoryManagerClient, populate: bool = False) -> None:
        self._client = client
        self._populate = populate
        self._lock = threading.Lock()
        self.buffers = self._map()
        self._trim_due = False
        client.on_stale.append(self._stale)
        client.on_trim.append(self._trim_soon)

    def _map(self) -> TempBuffers:
        client = self._client
        writer = None if client.read_only else client.arena("temp", write=True)
        ledger = client.arena("temp/ledger", write=True)
        maps = Maps(writer, client.arena("temp"), client.arena("temp/generations"), ledger)
        if self._populate:
            maps.populate()
        return TempBuffers(maps, client.welcome.node)

    def _stale(self) -> None:
        self.buffers.dead = True
        self.buffers = self._map()

    def _trim_soon(self) -> None:
        """The server is short of room: at the next use, unused slots go back."""
        self._trim_due = True

    def alloc(self, nbytes: int, *, timeout: float = 10.0) -> TempBuffer:
        """A buffer to compute into. Asks the server only when the magazine is empty.

        Raises:
            PoolFull: no room in time; names the holders.
            NeverFits: larger than any slot.
        """
        buffer = self.buffers.pop(nbytes)
        if buffer is not None:
            return buffer
        with self._lock:
            order, count = self.buffers.magazine(nbytes)
            body = lease_body(nbytes, count, timeout)
            size, entries = leased_of(self._client.call(Op.T_LEASE, body, timeout=timeout + self._client.timeout))
            self.buffers.rung()
            self.buffers.fill(order, size, entries)
        buffer = self.buffers.pop(nbytes)
        assert buffer is not None
        return buffer

    def publish(self, buffer: TempBuffer, dtype: str, shape: tuple[int, ...], consumers: int = 1) -> TensorRef:
        """See `TempBuffers.publish`."""
        return self.buffers.publish(buffer, dtype, shape, consumers)

    def put(self, array: NDArray[Any], consumers: int = 1, *, timeout: float = 10.0) -> TensorRef:
        """Copy an array in and publish it."""
        buffer = self.alloc(max(1, array.nbytes), timeout=timeout)
        buffer.nbytes = array.nbytes
        copy_in(buffer, array)
        return self.buffers.publish(buffer, array.dtype.name, array.shape, consumers)

    def adopt(self, ref: TensorRef, shares: int = 1) -> Share:
        """Take a share; see `TempBuffers.adopt`. Rings the server when enough has been released."""
        if self.buffers.should_ring:
            self.ring()
        return self.buffers.adopt(ref, shares)

    def ring(self) -> None:
        """Tell the server that shares have come back; waits for nothing."""
        self.buffers.rung()
        self._client.tell(Op.T_FLUSH)

    def flush(self) -> None:
        """Have everything released so far taken back before this returns."""
        self.buffers.rung()
        self._client.call(Op.T_FLUSH)

    def trim(self) -> None:
        """Return the slots in the magazines."""
        self._trim_due = False
        entries = self.buffers.drain()
        for at in range(0, len(entries), 4096):
            self._client.call(Op.T_RETURN, None, (np.array(entries[at : at + 4096], np.uint32),))

    def settle(self, refs: Sequence[TensorRef]) -> None:
        """Own published buffers that nobody adopts from now on: free once those who adopted them are done. Waits for
        nothing; buffers that are free already are passed over.
        """
        for at in range(0, len(refs), 4096):
            part = refs[at : at + 4096]
            slots = np.array([ref.offset // BLOCK for ref in part], np.uint32)
            self._client.tell(Op.T_SETTLE, None, (slots, np.array([ref.generation for ref in part], np.uint32)))

    def retract(self, ref: TensorRef, shares: int = 1) -> None:
        """Take back shares of an own published buffer that nobody will adopt (a send failed, a request was closed)."""
        self._client.call(Op.T_RETRACT, TempRetract(ref.offset // BLOCK, ref.generation, shares))


encode_ref = msgspec.msgpack.Encoder().encode
decode_ref = msgspec.msgpack.Decoder(TensorRef).decode
