"""What travels between nodes: envelopes of core messages, and the few messages of membership.

msgspec msgpack throughout. A batch is all that one loop tick has for one peer.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omni_flow.control.facts import ACK, END, FAILED, VALUE, Failure, Message
from omni_flow.control.runtime.tensors import Leased, Spilled, Tensors, ref_of

GATEWAY_ROLE: Final = -1
"""`Envelope.role` of what goes to the request's gateway."""

CLOSE: Final = -2
"""`Envelope.role` of a close: the request is over, forget it."""

LOST: Final = 5
"""Kind of the message to a gateway that a share (`ref` role, `number` share) is lost; `value` is the cause."""

TIMELINE: Final = 6
"""Kind of the message to a gateway that describes an activation: `ref` interface, `path`, `value` (replica, queued,
started, ended, note), times in seconds since the epoch."""

PREFIX: Final = 7
"""Kind of the message to a gateway that says which KV a request's inputs became: `ref` role, `value` (pool, marks)."""

LINEAGE: Final = 8
"""Kind of the message to a gateway that says how far a role has come with a session: `ref` role, `value` a number."""


class Head(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What every message of a request carries, encoded once at admission and passed on as bytes.

    `gateway` is the id of the gateway's incarnation, `number` the request's number there, `address` where it listens.
    `replicas[r]` are the replica ids of the shares of role r, pinned. `deadline_s` is what was left at admission, or
    None. `trace` is a W3C traceparent. `timeline`: the gateway wants to know of each activation. `tenant` is a salt
    that the server sets for its caller: what one caller has cached is no other's. `lineage`: role → how far it had come
    with the session, see `Context.lineage`.
    """

    graph: str
    gateway: str
    number: int
    address: str
    replicas: list[list[str]]
    params: dict[str, Any]
    seed: int
    session: str | None = None
    deadline_s: float | None = None
    trace: str | None = None
    timeline: bool = False
    tenant: str = ""
    lineage: dict[int, int] = {}


class Envelope(msgspec.Struct, array_like=True, tag=0, gc=False):
    """Messages of one request for one share (or the gateway, or a close). `oldest`: its gateway's oldest live one."""

    head: bytes
    oldest: int
    role: int
    share: int
    messages: list[Message]


class Record(msgspec.Struct, array_like=True, frozen=True):
    """A live replica. `id` is `role/k@epoch`: another incarnation has another id. `host` names the machine."""

    id: str
    role: str
    address: str
    host: str
    pid: int


class Register(msgspec.Struct, array_like=True, tag=1):
    """A replica says that it is ready. `load_s` is what `setup` and construction took."""

    record: Record
    load_s: float


class Roster(msgspec.Struct, array_like=True, tag=2):
    """The registry's whole view. `dead`: replica id → cause, for ids that live requests may name. `successors`:
    dead id → the id started in its place. `leaving`: ids that take no new requests."""

    version: int
    live: list[Record]
    dead: dict[str, str]
    successors: dict[str, str]
    leaving: list[str]
    gateways_gone: list[str]


class Suspect(msgspec.Struct, array_like=True, tag=3):
    """A peer's channel broke: the registry should look whether the process lives, and end it if not reachable."""

    address: str
    cause: str


class Retire(msgspec.Struct, array_like=True, tag=4):
    """The registry asks a replica to end: at once, or (`drain`) when its last request is closed."""

    drain: bool


class Subscribe(msgspec.Struct, array_like=True, tag=5):
    """A gateway asks for the roster, now and at each change."""

    gateway: str
    address: str


class Retired(msgspec.Struct, array_like=True, tag=6):
    """A replica says that it is empty and ends."""

    id: str


class Inspect(msgspec.Struct, array_like=True, tag=7):
    """Anyone asks a node what it holds; the answer goes to `reply_to`."""

    reply_to: str
    token: int


class Census(msgspec.Struct, array_like=True, tag=8):
    """What the replicas of a node hold: requests, open nodes, running activations, open numbers.

    `counters`: what their roles count.
    """

    address: str
    token: int
    held: dict[str, int]
    counters: dict[str, int] = {}


class Seen(msgspec.Struct, array_like=True, tag=9):
    """A node tells the registry that it knows the roster of `version`."""

    address: str
    version: int


class EndSession(msgspec.Struct, array_like=True, tag=10):
    """A gateway tells every replica that a session of a tenant is over: what roles keep for it is free."""

    session: str
    tenant: str


class Ailing(msgspec.Struct, array_like=True, tag=11):
    """A replica says that it can't serve for now, and why; with no cause, that it can again."""

    id: str
    cause: str


Packet = (
    Envelope
    | Register
    | Roster
    | Suspect
    | Retire
    | Subscribe
    | Retired
    | Inspect
    | Census
    | Seen
    | EndSession
    | Ailing
)

_encode_head = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(Head).decode


def encode_head(head: Head) -> bytes:
    """The bytes that travel in each envelope of a request."""
    return _encode_head(head)


def decode_head(data: bytes) -> Head:
    """Raises msgspec.DecodeError for anything else."""
    return _decode_head(data)


class BatchCodec:
    """The codec of the transports. `tensors`: where arrays lie that messages refer to.

    A payload is bytes; one that refers to arrays is a list of its bytes and the references.
    """

    def __init__(self, tensors: Tensors | None = None) -> None:
        self.encode = msgspec.msgpack.Encoder(enc_hook=_sending).encode
        self._tensors = tensors
        self._decode = msgspec.msgpack.Decoder(list[Packet]).decode

    def decode(self, packet: bytes | memoryview) -> list[Any]:
        """The packets of a batch. Raises msgspec.DecodeError or ValueError for anything malformed."""
        batch = self._decode(packet)
        for item in batch:
            if type(item) is Envelope:
                for message in item.messages:
                    kind = message.kind
                    if kind == VALUE:
                        if type(message.value) is list:
                            data, *refs = message.value
                            message.value = Leased(data, [ref_of(r) for r in refs], self._tensors)
                    elif kind == FAILED or (kind == END and type(message.value) is list):
                        message.value = Failure(*message.value)
                    elif kind == ACK:
                        reader, place = message.value
                        message.value = (reader, place)
        return batch


def _sending(value: Any) -> list[Any]:
    if type(value) is Spilled:
        return [value.sending(), *value.refs]
    raise TypeError(f"{type(value).__name__} is no payload")
