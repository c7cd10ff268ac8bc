"""Who may speak over tcp: loopback without a key, else CURVE with keys that both ends derive from one shared key."""

import asyncio
import hashlib
import ipaddress
import logging
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from omni_flow.control.transport.errors import AddressError, InsecureAddress, WeakKey

log = logging.getLogger(__name__)

KEY_BYTES = 16
"""Fewest bytes of a shared key."""

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # RFC 27
_ZAP_DOMAIN = b"omni-flow"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """`tcp://host:port` with a host that is one IP address."""

    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if self.host.version == 6 else str(self.host)
        return f"tcp://{host}:{self.port}"


def tcp_address(url: str, keyed: bool) -> TcpAddress:
    """The address in `url`. `localhost` is 127.0.0.1; other names are refused, for they may mean several machines.

    Raises: AddressError, InsecureAddress for a host other than loopback unless `keyed`.
    """
    host, colon, port = url.removeprefix("tcp://").rpartition(":")
    if not url.startswith("tcp://") or not colon or not port.isdecimal() or int(port) > 65535:
        raise AddressError(url, "write tcp://host:port")
    try:
        ip = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise AddressError(url, "the host must be an IP address (or localhost)") from None
    if ip.is_unspecified:
        raise AddressError(url, "name the one IP address under which the others reach this machine")
    if not ip.is_loopback and not keyed:
        raise InsecureAddress(url)
    return TcpAddress(ip, int(port))


class SharedKey:
    """The CURVE key pairs of a deployment: one that listeners use and one that senders use, both from the shared key.

    A listener proves that it holds the key by answering at all, a sender by its key pair, which the listener's
    `Doorkeeper` compares.
    """

    def __init__(self, key: str) -> None:
        """Raises: WeakKey."""
        secret = key.encode()
        if len(secret) < KEY_BYTES:
            raise WeakKey(len(secret), KEY_BYTES)
        self._listener = _pair(secret, b"omniflow-listen")
        self._sender = _pair(secret, b"omniflow-sender")

    @property
    def sender_public(self) -> bytes:
        """Z85."""
        return self._sender[0]

    def arm_listener(self, sock: "zmq.Socket[bytes]") -> None:
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, self._listener[0])
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._listener[1])
        sock.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)

    def arm_sender(self, sock: "zmq.Socket[bytes]") -> None:
        sock.setsockopt(zmq.CURVE_SERVERKEY, self._listener[0])
        sock.setsockopt(zmq.CURVE_PUBLICKEY, self._sender[0])
        sock.setsockopt(zmq.CURVE_SECRETKEY, self._sender[1])


def _pair(secret: bytes, purpose: bytes) -> tuple[bytes, bytes]:
    """(public, secret) in Z85: X25519 with BLAKE2b(secret) personalised by the purpose as the scalar."""
    scalar = z85.encode(hashlib.blake2b(secret, digest_size=32, person=purpose).digest())
    return zmq.curve_public(scalar), scalar


class Doorkeeper:
    """Answers a context's ZAP requests on the event loop: only the key pair of our senders may connect."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", key: SharedKey) -> None:
        self._welcome = z85.decode(key.sender_public)
        self._loop = asyncio.get_running_loop()
        self._sock = context.socket(zmq.REP)
        self._sock.setsockopt(zmq.LINGER, 0)
        self._sock.bind(_ZAP_ENDPOINT)
        self._loop.add_reader(self._sock.FD, self._answer)

    def _answer(self) -> None:
        while True:  # the descriptor wakes once for all that is there
            try:
                version, request, domain, address, _, mechanism, *credentials = self._sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = (domain, mechanism, credentials) == (_ZAP_DOMAIN, b"CURVE", [self._welcome])
            if not known:
                log.warning("a connection from %s was refused: not our shared key", address.decode(errors="replace"))
            status = [b"200", b"OK"] if known else [b"400", b"not the shared key"]
            self._sock.send_multipart([version, request, *status, b"", b""], zmq.NOBLOCK)

    def close(self) -> None:
        self._loop.remove_reader(self._sock.FD)
        self._sock.close()
