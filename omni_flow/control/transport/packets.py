"""The wire format of a SEQPACKET connection: pure, no sockets.

The first byte of a packet is its kind:

| kind | then |
|---|---|
| HELLO | magic, version (u8), address of the sender in UTF-8; the first packet, once |
| WHOLE | one encoded batch |
| CUT | length of the encoded batch (u32 little endian), its first bytes; the packets that follow on this connection
  are its further bytes without any header, until the length is reached |
| REFUSED | a reason in UTF-8, from the accepting side before it closes |
"""

from omni_flow.control.transport.base import MESSAGE_LIMIT, PROTOCOL_VERSION
from omni_flow.control.transport.errors import ProtocolError, VersionMismatch

HELLO, WHOLE, CUT, REFUSED = b"\x01", b"\x02", b"\x03", b"\x04"
PACKET_BYTES = 64 * 1024
"""Most bytes of one packet: well under the smallest usual socket buffer (208 KiB), so that two are in flight."""

_MAGIC = b"omniflow"
_HELLO_KIND, _WHOLE_KIND, _CUT_KIND = HELLO[0], WHOLE[0], CUT[0]
_CUT_HEADER = 5


def hello(address: str) -> bytes:
    """The first packet of a connection. Its layout is the same in every protocol version."""
    return HELLO + _MAGIC + bytes([PROTOCOL_VERSION]) + address.encode()


def read_hello(packet: bytes | memoryview) -> str:
    """The address that a hello names.

    Raises: VersionMismatch, ProtocolError for anything but a hello.
    """
    address, version = _parts(packet)
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(address, version, PROTOCOL_VERSION)
    return address


def sender(packet: bytes | memoryview) -> str:
    """The address that a hello of any protocol version names.

    Raises: ProtocolError for anything but a hello.
    """
    return _parts(packet)[0]


def _parts(packet: bytes | memoryview) -> tuple[str, int]:
    """Address and protocol version of a hello."""
    data = bytes(packet)
    start = 1 + len(_MAGIC)
    if data[:start] != HELLO + _MAGIC or len(data) <= start + 1:
        raise ProtocolError("the first packet is no hello")
    try:
        return data[start + 1 :].decode(), data[start]
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the address in the hello is not UTF-8: {error}") from error


def cut(message: bytes) -> list[bytes | memoryview]:
    """The packets of one encoded batch of any size up to the limit."""
    if len(message) < PACKET_BYTES:
        return [WHOLE + message]
    view = memoryview(message)
    first = PACKET_BYTES - _CUT_HEADER
    packets: list[bytes | memoryview] = [CUT + len(message).to_bytes(4, "little") + view[:first]]
    packets += (view[at : at + PACKET_BYTES] for at in range(first, len(message), PACKET_BYTES))
    return packets


class Joiner:
    """Joins the packets of one connection into encoded batches.

    The caller receives each packet into `target` and then calls `take` with its real length, even if that is more
    than `target` holds. `target` is `scratch`, which connections may share, between batches, and inside a cut batch
    the place where the next bytes belong, so that large batches are not copied again.
    """

    __slots__ = ("_message", "_missing", "_scratch", "target")

    def __init__(self, scratch: memoryview) -> None:
        """`scratch` holds at least PACKET_BYTES."""
        self._scratch = scratch
        self._message: memoryview | None = None
        self._missing = 0
        self.target = scratch

    @property
    def idle(self) -> bool:
        """No batch is half received."""
        return self._message is None

    def take(self, size: int) -> bytes | memoryview | None:
        """The encoded batch that the packet of `size` bytes in `target` completes, if it does.

        Raises: ProtocolError; the connection is of no use afterwards.
        """
        target = self.target
        if self._message is None and 0 < size <= PACKET_BYTES and target[0] == _WHOLE_KIND:
            return bytes(target[1:size])
        return self._take_cut(size)

    def _take_cut(self, size: int) -> memoryview | None:
        if not 0 < size <= len(self.target):
            raise ProtocolError(f"a packet of {size} bytes where at most {len(self.target)} fit")
        if self._message is None:
            self._begin(size)
        else:
            self._missing -= size
        assert self._message is not None
        if self._missing:
            self.target = self._message[-self._missing :]
            return None
        message, self._message, self.target = self._message, None, self._scratch
        return message.toreadonly()

    def _begin(self, size: int) -> None:
        kind = self.target[0]
        if kind != _CUT_KIND or size <= _CUT_HEADER:
            raise ProtocolError(f"a packet of kind {kind} and {size} bytes where a batch begins")
        total = int.from_bytes(self.target[1:_CUT_HEADER], "little")
        if total > MESSAGE_LIMIT:
            raise ProtocolError(f"a batch of {total} bytes, the limit is {MESSAGE_LIMIT}")
        held = size - _CUT_HEADER
        if total <= held:
            raise ProtocolError(f"a batch of {total} bytes announced as cut, its first packet holds {held}")
        self._message = memoryview(bytearray(total))
        self._message[:held] = self.target[_CUT_HEADER:size]
        self._missing = total - held
