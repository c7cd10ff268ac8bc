"""What the tcp driver says on a connection: handshake, frames, and exact sends and receives.

After the handshake the client sends requests and the server answers in order. A request is `REQUEST`, then its pieces
as (offset u64, length u64) rows, then for a write the payload. An answer is `ANSWER`, then for a good read the
payload, or for a refusal a code and a text. Everything is little-endian. The handshake proves that both sides hold one
secret; what follows is checked against accidents by xxh3, not encrypted.
"""

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from omni_flow.data.transfer.chunks import MAX_CHUNK_BYTES, MAX_PIECES
from omni_flow.data.transfer.errors import AuthRefused, PeerRestarted

MAGIC = b"OFX1"
READ, WRITE = 1, 2
GOOD, REFUSED = 0, 1
REQUEST = struct.Struct("<4sBxHIQQQ")
ANSWER = struct.Struct("<4sBxHxxxxQQQ")
_HELLO = struct.Struct("<4s16s32s")
_PROOF = struct.Struct("<4s32s32s")
_TIMEVAL = struct.Struct("@ll")
MAX_TEXT = 1024


class BadFrame(ConnectionError):
    """Bytes that are not of this protocol: the connection ends, nothing else happens."""


class Request(NamedTuple):
    op: int
    pieces: int
    arena: int
    tag: int
    nbytes: int
    checksum: int

    def pack(self) -> bytes:
        return REQUEST.pack(MAGIC, *self)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> "Request":
        """Raises: BadFrame when magic, op or sizes are out of range."""
        magic, *rest = REQUEST.unpack(data)
        made = cls(*rest)
        if magic != MAGIC or made.op not in (READ, WRITE):
            raise BadFrame("not a request of this protocol")
        if not 1 <= made.pieces <= MAX_PIECES or not 1 <= made.nbytes <= MAX_CHUNK_BYTES:
            raise BadFrame(f"a request of {made.pieces} pieces and {made.nbytes} bytes is beyond the limits")
        return made


class Answer(NamedTuple):
    status: int
    text_bytes: int
    tag: int
    nbytes: int
    checksum: int

    def pack(self) -> bytes:
        return ANSWER.pack(MAGIC, *self)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> "Answer":
        """Raises: BadFrame."""
        magic, *rest = ANSWER.unpack(data)
        made = cls(*rest)
        if magic != MAGIC or made.status not in (GOOD, REFUSED) or made.text_bytes > MAX_TEXT:
            raise BadFrame("not an answer of this protocol")
        return made


def refusal(tag: int, code: str, text: str) -> bytes:
    """A whole refusing answer."""
    body = f"{code}\n{text}".encode()[:MAX_TEXT]
    return Answer(REFUSED, len(body), tag, 0, 0).pack() + body


def set_timeouts(sock: socket.socket, seconds: float, *, receive: bool = True, send: bool = True) -> None:
    """Kernel timeouts on a blocking socket; an operation that meets one raises BlockingIOError."""
    value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    if receive:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    if send:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def receive_exact(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill the views in order. Raises: ConnectionError when the peer ends early, BlockingIOError on a stall."""
    if len(views) == 1:
        left = views[0]
        while left:
            got = sock.recv_into(left, 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionResetError("the peer ended the connection")
            left = left[got:]
        return
    pending = list(views)
    while pending:
        got = sock.recvmsg_into(pending, 0, socket.MSG_WAITALL)[0]
        if not got:
            raise ConnectionResetError("the peer ended the connection")
        pending = _rest(pending, got)


def send_all(sock: socket.socket, views: Sequence[memoryview | bytes]) -> None:
    """Send the views in order, gathered by the kernel. Raises: OSError, BlockingIOError on a stall."""
    pending = [memoryview(view) for view in views]
    while pending:
        pending = _rest(pending, sock.sendmsg(pending[:MAX_PIECES]))


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[index + 1 :]]
        done -= len(view)
    return []


def checksum(views: Sequence[memoryview]) -> int:
    """xxh3_64 of the views one after the other."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def _mac(secret: bytes, side: bytes, boot: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.new(secret, b"omni-flow transfer " + side + boot + server + client, hashlib.sha256).digest()


def greet_as_server(sock: socket.socket, secret: bytes, boot: bytes) -> bool:
    """Challenge a client; False when it has not the secret, is something
    else altogether, or dawdles beyond the socket's timeout. Raises: OSError."""
    nonce = os.urandom(32)
    sock.sendall(_HELLO.pack(MAGIC, boot, nonce))
    data = bytearray(_PROOF.size)
    if sock.recv_into(data, 0, socket.MSG_WAITALL) != len(data):
        return False
    magic, theirs, proof = _PROOF.unpack(data)
    if magic != MAGIC or not hmac.compare_digest(proof, _mac(secret, b"client", boot, nonce, theirs)):
        return False
    sock.sendall(_mac(secret, b"server", boot, nonce, theirs))
    return True


def greet_as_client(sock: socket.socket, secret: bytes, boot: bytes) -> None:
    """Answer the challenge and challenge back. Raises: AuthRefused, PeerRestarted, BadFrame, OSError."""
    data = bytearray(_HELLO.size)
    receive_exact(sock, [memoryview(data)])
    magic, their_boot, theirs = _HELLO.unpack(data)
    if magic != MAGIC:
        raise BadFrame("what listens there is no transfer driver")
    if their_boot != boot:
        raise PeerRestarted("the peer's transfer driver has started anew; ask its manager for the present endpoint")
    nonce = os.urandom(32)
    sock.sendall(_PROOF.pack(MAGIC, nonce, _mac(secret, b"client", boot, theirs, nonce)))
    reply = bytearray(32)
    try:
        receive_exact(sock, [memoryview(reply)])
    except ConnectionError as error:
        raise AuthRefused("the peer refused the key; give both nodes the same transfer key") from error
    if not hmac.compare_digest(bytes(reply), _mac(secret, b"server", boot, theirs, nonce)):
        raise AuthRefused("the peer does not hold the key; give both nodes the same transfer key")
