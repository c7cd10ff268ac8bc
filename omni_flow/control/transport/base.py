"""The seam: what the runtime may rely on, whichever transport carries its batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from omni_flow.control.transport.errors import MessageTooLarge

PROTOCOL_VERSION = 1
"""Said in the first packet of every connection; another version is refused."""

MESSAGE_LIMIT = 64 * 1024 * 1024
"""Most bytes of one encoded message; both ends enforce it."""

OnBatch: TypeAlias = Callable[[str, list[Any]], None]
"""Called with (address of the sender, its batch)."""

OnLost: TypeAlias = Callable[[str, str], None]
"""Called with (address of the peer, cause in words)."""


class Codec(Protocol):
    """Turns a batch (all messages of one loop tick for one peer) into bytes and back."""

    def encode(self, batch: list[Any]) -> bytes: ...

    def decode(self, packet: bytes | memoryview) -> list[Any]:
        """The batch in `packet`, which never changes afterwards: results may point into it.

        Any exception means a malformed packet: the transport logs it and drops the peer.
        """
        ...


class Transport(ABC):
    """Carries batches between addresses. One per process, or per replica where replicas share a process.

    Every call and every callback happens on the thread of the event loop that ran `start()`. Any loop with
    `add_reader` will do (asyncio's own, uvloop).

    Promises: batches of one sender arrive in order and once, as long as `on_lost` is not said. `on_lost(peer)` says
    that messages to or from that peer were or may have been lost (it died, closed, refused, sent garbage); it is said
    once for each incarnation of the channel, after the last batch of that incarnation. Sending to that address later
    opens a new incarnation.

    Receivers always read and nothing here bounds what waits for a slow peer: credit (the number of open frames of a
    stream) bounds it, in the layer above.
    """

    address: str
    """Where others reach this transport. Known after `start()`."""

    @abstractmethod
    async def start(self, on_batch: OnBatch, on_lost: OnLost) -> None:
        """Begin to listen.

        Raises: AddressInUse, AddressTooLong, InsecureAddress, InsecureDirectory, AddressError.
        """

    @abstractmethod
    def send(self, address: str, batch: list[Any]) -> None:
        """Give one batch to the channel to `address`, connecting first if need be. Never blocks.

        A peer that cannot be reached is said through `on_lost`, never raised, and never from inside this call. What
        is sent between the loss and its `on_lost` is lost with the rest. A batch over the limit whose single messages
        are within it travels as several batches.

        Raises: MessageTooLarge (nothing of the batch was sent), AddressError (not an address of this transport),
            TransportClosed.
        """

    @abstractmethod
    def forget(self, address: str) -> None:
        """Close the channels to and from that peer and drop what is queued. No `on_lost` here; the peer gets one."""

    @abstractmethod
    async def close(self, deadline_s: float = 5.0) -> None:
        """Send what is queued, for at most `deadline_s`, then close. Leaves no socket file. Idempotent.

        Peers get every batch that was flushed, then `on_lost`. What SEQPACKET could not flush is logged (ZeroMQ does
        not tell). No callback comes after this returns.
        """


def within_limit(codec: Codec, address: str, batch: list[Any], packet: bytes) -> list[bytes]:
    """`packet`, which is `batch` encoded; over the limit, the encoded halves of the batch instead, in order.

    Raises: MessageTooLarge for a single message over the limit.
    """
    if len(packet) <= MESSAGE_LIMIT:
        return [packet]
    if len(batch) <= 1:
        raise MessageTooLarge(address, len(packet), MESSAGE_LIMIT)
    half = len(batch) // 2
    parts = batch[:half], batch[half:]
    return [piece for part in parts for piece in within_limit(codec, address, part, codec.encode(part))]
