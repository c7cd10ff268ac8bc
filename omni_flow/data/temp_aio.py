"""TempBuffers over the asynchronous client: as `TempClient`, with `await` where the server may have to be asked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.errors import PoolFull
from omni_flow.data.protocol import Op
from omni_flow.data.temp_arrays import Share, TempBuffer
from omni_flow.data.temp_buffers import TempBuffers
from omni_flow.data.temp_client import copy_in, described, dtype_name, lease_body, leased_of, retract_body
from omni_flow.data.temp_shares import Maps
from omni_flow.refs import TensorRef

if TYPE_CHECKING:
    from omni_flow.data.aio_client import AsyncMemoryManagerClient


class AsyncTempClient:
    """TempBuffers of one event loop. Shares may be released from any thread, everything else belongs to the loop.

    Args:
        populate: as of `TempClient`; blocks the loop meanwhile.
    """

    def __init__(self, client: AsyncMemoryManagerClient, populate: bool = False) -> None:
        self._client = client
        self._populate = populate
        self._lock = asyncio.Lock()
        self.buffers = self._map()
        self._trimming: asyncio.Task[None] | None = None
        client.session.on_stale.append(self._stale)
        client.session.on_trim.append(self._trim_soon)

    def _map(self) -> TempBuffers:
        client = self._client
        writer = None if client.session.read_only else client.arena("temp", write=True)
        ledger = client.arena("temp/ledger", write=True)
        maps = Maps(writer, client.arena("temp"), client.arena("temp/slots", write=writer is not None), ledger)
        if self._populate:
            maps.populate()
        return TempBuffers(maps, client.session.welcome.node)

    def _stale(self) -> None:
        """As of `TempClient`."""
        self.buffers.die()
        self.buffers = self._map()

    def _living(self) -> TempBuffers:
        """As of `TempClient`."""
        if self.buffers.dead:
            self.buffers = self._map()
        return self.buffers

    def _trim_soon(self) -> None:
        """The server is short of room: unused slots go back."""
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.get_running_loop().create_task(self.trim(), name="trim TempBuffers")

    async def alloc(self, nbytes: int, *, timeout: float = 10.0) -> TempBuffer:
        """See `TempClient.alloc`."""
        while (buffer := self.buffers.pop(nbytes)) is None:
            async with self._lock:
                if (buffer := self._living().pop(nbytes)) is not None:
                    return buffer
                order, count = self.buffers.magazine(nbytes)
                body = lease_body(nbytes, count, timeout)
                reply = await self._client.call(Op.T_LEASE, body, timeout=timeout + self._client.session.timeout)
                self.buffers.rung()
                self.buffers.fill(order, *leased_of(reply))
        return buffer

    def alloc_now(self, nbytes: int) -> TempBuffer | None:
        """A buffer if the magazine has one; never waits."""
        return self.buffers.pop(nbytes)

    def publish(self, buffer: TempBuffer, dtype: str, shape: tuple[int, ...], consumers: int = 1) -> TensorRef:
        """See `TempBuffers.publish`."""
        return self.buffers.publish(buffer, *described(dtype, shape), consumers)

    async def put(self, array: NDArray[Any], consumers: int = 1, *, timeout: float = 10.0) -> TensorRef:
        """See `TempClient.put`."""
        name = dtype_name(array.dtype)
        buffer = await self.alloc(max(1, array.nbytes), timeout=timeout)
        buffer.nbytes = array.nbytes
        copy_in(buffer, array)
        return self.buffers.publish(buffer, name, array.shape, consumers)

    async def adopt(self, ref: TensorRef, shares: int = 1) -> Share:
        """See `TempClient.adopt`."""
        buffers = self._living() if self.buffers.dead else self.buffers
        if buffers.should_ring:
            self.ring()
        try:
            return self.buffers.adopt(ref, shares)
        except PoolFull:
            await self.flush()
            return self.buffers.adopt(ref, shares)

    async def forward(self, share: Share, consumers: int = 1) -> None:
        """See `TempClient.forward`."""
        while not self.buffers.may_forward:
            await self.flush()
        self.buffers.forward(share, consumers)
        if self._client.session.read_only:
            await self.flush()

    def ring(self) -> None:
        """Tell the server that shares have come back."""
        op = Op.T_RENEW if self.buffers.low else Op.T_FLUSH
        self.buffers.rung()
        self._client.tell(op)

    async def flush(self) -> None:
        """Have everything released so far taken back before this returns."""
        self.buffers.rung()
        await self._client.call(Op.T_FLUSH)

    async def trim(self) -> None:
        """Return the slots in the magazines."""
        entries = self.buffers.drain()
        for at in range(0, len(entries), 4096):
            await self._client.call(Op.T_RETURN, None, (np.array(entries[at : at + 4096], np.uint32),))

    async def retract(self, ref: TensorRef, shares: int = 1) -> None:
        """See `TempClient.retract`."""
        await self._client.call(Op.T_RETRACT, retract_body(ref, shares))
