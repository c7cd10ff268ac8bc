"""Replicas of one process: batches are handed over as they are, no bytes, no system call."""

import asyncio
from collections import deque
from typing import Any, TypeAlias

from omni_flow.control.transport.base import OnBatch, OnLost, Transport
from omni_flow.control.transport.errors import AddressError, AddressInUse, TransportClosed

_Item: TypeAlias = tuple[str, list[Any] | None, str]
"""(sender, its batch or None where it is lost, the cause)."""


class InprocHub:
    """The transports of one process by address. Pass the same hub to all that shall reach each other (one loop)."""

    def __init__(self) -> None:
        self.members: dict[str, InprocTransport] = {}


class InprocTransport(Transport):
    """`inproc://name`. The receiver gets the very list that was sent: nobody may change it or its messages afterwards.

    Nothing is encoded, so the 64 MiB limit has nothing to measure and does not apply. All batches of one tick are
    delivered by one wake.
    """

    def __init__(self, url: str, hub: InprocHub) -> None:
        if not url.startswith("inproc://") or url == "inproc://":
            raise AddressError(url, "write inproc://name")
        self.address = url
        self._hub = hub
        self._inbox: deque[_Item] = deque()
        self._waking = False
        self._peers: set[str] = set()  # those with whom a channel is open, either way
        self._losing: dict[str, _Item] = {}  # the on_lost in the inbox behind which nothing more of that peer lies
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, on_batch: OnBatch, on_lost: OnLost) -> None:
        if self.address in self._hub.members:
            raise AddressInUse(self.address)
        self._on_batch, self._on_lost = on_batch, on_lost
        self._loop = asyncio.get_running_loop()
        self._hub.members[self.address] = self

    def send(self, address: str, batch: list[Any]) -> None:
        if self._loop is None:
            raise TransportClosed("is not running")
        peer = self._hub.members.get(address)
        if peer is None:
            if not address.startswith("inproc://"):
                raise AddressError(address, "this transport reaches inproc:// only")
            self._put_lost(address, "nobody of that name in this process")
            return
        if address not in self._peers:
            self._peers.add(address)
            peer._peers.add(self.address)
        peer._put(self.address, batch)

    def forget(self, address: str) -> None:
        self._losing.pop(address, None)
        self._inbox = deque(item for item in self._inbox if item[0] != address)
        if address in self._peers:
            self._leave(address, "the peer closed the channel", drop=True)

    async def close(self, deadline_s: float = 5.0) -> None:
        if self._loop is None:
            return
        self._loop = None
        del self._hub.members[self.address]
        self._inbox.clear()
        for address in list(self._peers):
            self._leave(address, "the peer closed", drop=False)

    def _leave(self, address: str, cause: str, drop: bool) -> None:
        self._peers.discard(address)
        peer = self._hub.members.get(address)
        if peer is None or self.address not in peer._peers:
            return
        peer._peers.discard(self.address)
        if drop:
            peer._inbox = deque(i for i in peer._inbox if i[0] != self.address or i[1] is None)
        peer._put_lost(self.address, cause)

    def _put_lost(self, peer: str, cause: str) -> None:
        if peer not in self._losing:
            self._losing[peer] = (peer, None, cause)
            self._inbox.append(self._losing[peer])
            self._wake()

    def _put(self, sender: str, batch: list[Any]) -> None:
        self._losing.pop(sender, None)
        self._inbox.append((sender, batch, ""))
        self._wake()

    def _wake(self) -> None:
        if not self._waking and self._loop is not None:
            self._waking = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Deliver what was there when this began; what comes meanwhile gets the next tick, so others have a turn."""
        self._waking = False
        count = len(self._inbox)
        try:
            while count and self._inbox and self._loop is not None:
                count -= 1
                item = self._inbox.popleft()
                sender, batch, cause = item
                if batch is not None:
                    self._on_batch(sender, batch)
                else:
                    if self._losing.get(sender) is item:
                        del self._losing[sender]
                    self._on_lost(sender, cause)
        finally:  # a callback that raises costs the others nothing
            if self._inbox:
                self._wake()
