"""Moving batches of messages between processes: in-process queue, Unix SEQPACKET, ZeroMQ, behind one seam.

Open `base.py` first: the seam and its promises. `unix.py` is the default on one node, `inproc.py` joins replicas of
one process, `zeromq.py` serves `ipc://` and `tcp://`. `packets.py` is the pure wire format.
"""

from omni_flow.control.transport.base import (
    MESSAGE_LIMIT,
    PROTOCOL_VERSION,
    Codec,
    OnBatch,
    OnLost,
    Transport,
)
from omni_flow.control.transport.errors import (
    AddressError,
    AddressInUse,
    AddressTooLong,
    InsecureAddress,
    InsecureDirectory,
    MessageTooLarge,
    ProtocolError,
    TransportClosed,
    TransportError,
    VersionMismatch,
    WeakKey,
)
from omni_flow.control.transport.factory import make_transport
from omni_flow.control.transport.inproc import InprocHub

__all__ = [
    "MESSAGE_LIMIT",
    "PROTOCOL_VERSION",
    "AddressError",
    "AddressInUse",
    "AddressTooLong",
    "Codec",
    "InprocHub",
    "InsecureAddress",
    "InsecureDirectory",
    "MessageTooLarge",
    "OnBatch",
    "OnLost",
    "ProtocolError",
    "Transport",
    "TransportClosed",
    "TransportError",
    "VersionMismatch",
    "WeakKey",
    "make_transport",
]
