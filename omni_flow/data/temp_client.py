"""`TempClient`: TempBuffers over the blocking client. The server is asked when no slot is left to compute into."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.data.arguments import MOST, milliseconds, text, whole
from omni_flow.data.errors import BadArgument, CallTimeout, Disconnected, PoolFull
from omni_flow.data.ledger import BLOCK, MAX_FANOUT
from omni_flow.data.messages import TempLease, TempLeased, TempRetract
from omni_flow.data.protocol import Message, Op
from omni_flow.data.temp_arrays import Share, TempBuffer, has_bytes
from omni_flow.data.temp_buffers import TempBuffers
from omni_flow.data.temp_shares import Maps
from omni_flow.refs import TensorRef

if TYPE_CHECKING:
    from omni_flow.data.client import MemoryManagerClient

_PART = 4096
"""Most rows of one message."""
_NAME = 100
"""Most characters of a type's name."""


def lease_body(nbytes: int, count: int, timeout: float) -> TempLease:
    return TempLease(whole("nbytes", nbytes, 1), count, milliseconds("timeout", timeout))


def described(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """What a publication says of its buffer. Raises BadArgument: no type's name, or no shape."""
    if not isinstance(shape, tuple):
        raise BadArgument(f"shape: {brief(shape)}", "give a tuple")
    # On the way of each hand-over: the checks are called, with cold caches, only for what they may refuse.
    if type(dtype) is not str or not 0 < len(dtype) <= _NAME or not dtype.isascii():
        dtype = text("dtype", dtype, _NAME)
    for extent in shape:
        if type(extent) is not int or not 0 <= extent <= MOST:
            return dtype, tuple(whole("shape", one) for one in shape)
    return dtype, shape


def retract_body(ref: TensorRef, shares: int) -> TempRetract:
    return TempRetract(ref.offset // BLOCK, ref.generation, whole("shares", shares, 1, MAX_FANOUT))


def leased_of(reply: Message) -> tuple[int, list[tuple[int, int, int]]]:
    """Size of the slots and (entry, slot, generation) of each."""
    entries, slots, generations = (reply.column(i, "<u4").tolist() for i in range(3))
    return reply.body(TempLeased).size, list(zip(entries, slots, generations, strict=True))


def copy_in(buffer: TempBuffer, array: NDArray[Any]) -> None:
    """Copy a numpy array into a buffer, in this machine's byte order: a type's name does not say any other."""
    np.copyto(buffer.numpy(array.shape, array.dtype.newbyteorder("=")), array)


@functools.cache
def dtype_name(kind: np.dtype[Any]) -> str:
    """`kind.name`, which numpy composes anew each time: after a copy, with cold caches, that took 16 µs.

    Raises:
        BadArgument: objects, texts and records.
    """
    if not has_bytes(kind):
        raise BadArgument(f"an array of {kind} has no byte form", "give an array of numbers")
    return kind.name


class TempClient:
    """TempBuffers over a blocking client.

    Buffers may be allocated and discarded, and shares released, from any thread; the rest belongs to the client's.

    Args:
        populate: fault this process's mappings in now (some 0.5 s per GiB); else each page costs a fault at its
        first use.
        bell: called, in any thread, when enough has been released to `ring`; by default it rings at once, if it is
        the client's thread that releases.
        direct: only readers give slots back to this client without the server. For those who `take_events` as soon as
        there are any: what has come back so is nobody else's until this client is asked for it.
    """

    def __init__(
        self,
        client: MemoryManagerClient,
        populate: bool = False,
        bell: Callable[[], None] | None = None,
        direct: bool = False,
    ) -> None:
        self._client = client
        self._populate = populate
        self._direct = direct
        self._bell = bell or self._ring_here
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self.buffers = self._map()
        client.on_stale.append(self._stale)
        client.on_trim.append(self.trim)

    def _map(self) -> TempBuffers:
        client = self._client
        writer = None if client.read_only else client.arena("temp", write=True)
        ledger = client.arena("temp/ledger", write=True)
        maps = Maps(writer, client.arena("temp"), client.arena("temp/slots", write=writer is not None), ledger)
        if self._populate:
            maps.populate()
        return TempBuffers(maps, client.welcome.node, self._bell, direct=self._direct)

    def _stale(self) -> None:
        """The server is a new one. Where its arenas can't be mapped now, they are when they are needed next."""
        self.buffers.die()
        self.buffers = self._map()

    def _living(self) -> TempBuffers:
        """The buffers, mapped now if that was not possible when the server was new."""
        if self.buffers.dead:
            self.buffers = self._map()
        return self.buffers

    def alloc(self, nbytes: int, *, timeout: float = 10.0) -> TempBuffer:
        """A buffer to compute into. Asks the server only when no slot of the size lies ready.

        Raises:
            PoolFull: no room in time; names the holders.
            NeverFits: larger than any slot.
        """
        while (buffer := self.buffers.pop(nbytes)) is None:
            with self._lock:
                if (buffer := self._living().pop(nbytes)) is not None:
                    break
                order, count = self.buffers.magazine(nbytes)
                body = lease_body(nbytes, count, timeout)
                size, entries = leased_of(self._client.call(Op.T_LEASE, body, timeout=timeout + self._client.timeout))
                self.buffers.rung()
                self.buffers.fill(order, size, entries)
        return buffer

    def publish(self, buffer: TempBuffer, dtype: str, shape: tuple[int, ...], consumers: int = 1) -> TensorRef:
        """See `TempBuffers.publish`."""
        return self.buffers.publish(buffer, *described(dtype, shape), consumers)

    def put(self, array: NDArray[Any], consumers: int = 1, *, timeout: float = 10.0) -> TensorRef:
        """Copy an array in and publish it. Raises BadArgument: its elements are no numbers."""
        name = dtype_name(array.dtype)
        buffer = self.alloc(max(1, array.nbytes), timeout=timeout)
        buffer.nbytes = array.nbytes
        copy_in(buffer, array)
        return self.buffers.publish(buffer, name, array.shape, consumers)

    def adopt(self, ref: TensorRef, shares: int = 1) -> Share:
        """Take a share; see `TempBuffers.adopt`. What this client has released makes room for it."""
        try:
            buffers = self._living() if self.buffers.dead else self.buffers
            return buffers.adopt(ref, shares)
        except PoolFull:
            self.flush()
            return self.buffers.adopt(ref, shares)

    def forward(self, share: Share, consumers: int = 1) -> None:
        """Give further shares of a held buffer to other readers; see `TempBuffers.forward`."""
        if not self.buffers.may_forward:
            self.flush()
        self.buffers.forward(share, consumers)
        if self._client.read_only:  # only the server can write that the share is no longer the only one
            self.flush()

    def _ring_here(self) -> None:
        """From a finalizer, too: a server that is gone, or stands still, is the next call's business."""
        if threading.get_ident() == self._thread:
            with contextlib.suppress(CallTimeout, Disconnected):
                self.ring()

    def ring(self) -> None:
        """Tell the server that shares have come back; waits for nothing."""
        op = Op.T_RENEW if self.buffers.low else Op.T_FLUSH
        self.buffers.rung()
        self._client.tell(op)

    def flush(self) -> None:
        """Have everything released so far taken back before this returns."""
        with self._lock:
            self.buffers.rung()
            self._client.call(Op.T_FLUSH)

    def take_events(self) -> None:
        """Take in what the server says unasked, unless a call in another thread does so anyway.

        Raises:
            Disconnected: the server is gone.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._client.take_events()
            finally:
                self._lock.release()

    def trim(self, idle: bool = False) -> None:
        """Return the slots that lie unused, as the server asks when it is short of room. Waits for nothing.

        Args:
            idle: only those of sizes not asked for since the last time.
        """
        entries = self.buffers.drain(idle)
        for at in range(0, len(entries), _PART):
            self._client.tell(Op.T_RETURN, None, (np.array(entries[at : at + _PART], np.uint32),))

    def settle(self, refs: Sequence[TensorRef]) -> None:
        """Buffers published or forwarded to readers of whom none comes from now on: free once those who adopted them
        are done. Once per publication and forward. Waits for nothing; buffers that are free already are passed over.
        """
        refs = self.buffers.give_up(refs)
        for at in range(0, len(refs), _PART):
            part = refs[at : at + _PART]
            slots = np.array([ref.offset // BLOCK for ref in part], np.uint32)
            self._client.tell(Op.T_SETTLE, None, (slots, np.array([ref.generation for ref in part], np.uint32)))

    def retract(self, ref: TensorRef, shares: int = 1) -> None:
        """Take back shares of an own published buffer that nobody will adopt (a send failed, a request was closed)."""
        with self._lock:
            self._client.call(Op.T_RETRACT, retract_body(ref, shares))


encode_ref = msgspec.msgpack.Encoder().encode
decode_ref = msgspec.msgpack.Decoder(TensorRef).decode
