"""CURVE keys from a shared secret: who knows the secret knows the server's public key, and nobody else can connect."""

from __future__ import annotations

import hashlib
import ipaddress

import zmq
from zmq.utils import z85

from omni_flow.data.errors import Refused


def server_keys(shared: str) -> tuple[bytes, bytes]:
    """Public and secret key of the server for a shared secret."""
    digest = hashlib.sha256(b"omni-flow memory curve\0" + shared.encode()).digest()
    secret = z85.encode(digest)
    return zmq.curve_public(secret), secret


def require_safe(endpoint: str, shared: str) -> None:
    """Refuse to listen beyond this machine without encryption.

    Raises:
        Refused: a tcp endpoint that is not loopback, without a shared key.
    """
    if shared or not endpoint.startswith("tcp://"):
        return
    host = endpoint.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise Refused(f"{endpoint} can be reached from elsewhere", "bind to 127.0.0.1 or set a shared key")
