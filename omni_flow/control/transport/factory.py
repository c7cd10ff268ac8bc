"""One way to get a transport: by the scheme of its address."""

from omni_flow.control.transport.base import Codec, Transport
from omni_flow.control.transport.errors import AddressError
from omni_flow.control.transport.inproc import InprocHub, InprocTransport
from omni_flow.control.transport.unix import UnixTransport
from omni_flow.control.transport.zeromq import ZmqTransport


def make_transport(url: str, codec: Codec, *, key: str | None = None, hub: InprocHub | None = None) -> Transport:
    """The transport that will listen at `url`; nothing is opened before `start()`.

    Args:
        url: `inproc://name`, `unix:///dir/name.sock`, `ipc:///dir/name.sock` or `tcp://host:port` (port 0: any free).
        codec: encodes and decodes batches; `inproc` does not use it.
        key: secret shared by all processes of a deployment, for `tcp`: encrypts and authenticates, and is required
            for hosts other than loopback.
        hub: where `inproc` transports meet; required for `inproc`, ignored otherwise.

    Raises: AddressError for an unknown scheme, or `inproc` without a hub, and what its transport raises.
    """
    scheme = url.partition("://")[0]
    if scheme == "unix":
        return UnixTransport(url, codec)
    if scheme in ("ipc", "tcp"):
        return ZmqTransport(url, codec, key=key)
    if scheme == "inproc":
        if hub is None:
            raise AddressError(url, "inproc needs the InprocHub where its transports meet; pass hub=...")
        return InprocTransport(url, hub)
    raise AddressError(url, "unknown scheme; use inproc://, unix://, ipc:// or tcp://")
