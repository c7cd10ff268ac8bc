"""ZeroMQ over `ipc://` and `tcp://`: for processes on other machines, and where SEQPACKET is not wanted.

One bound PULL receives; each peer gets a PUSH of its own, opened at the first batch. Raw sockets on the loop through
their descriptors, which are edge-triggered: whoever is woken receives until `zmq.Again`, or has itself called again.

A message is one frame: the 8-byte name of its channel, new for each connection (`zmq_names.py`), then the batch. A
channel begins with a hello of two frames (`HELLO` + name, then the hello of `packets.py`). `REFUSED` + name + a hello +
zero + a reason says that its sender dropped the channel of that name, which a PULL cannot say by closing a connection:
whoever drops a channel that may still be open says so (`zmq_refusal.py`), else the peer would send to nobody for ever.

Frames of different connections come in any order, the hellos of two channels of one peer too, so a name says which of
them is the younger.

Loss is seen by socket monitors. The monitor of a PUSH belongs to one peer. The monitor of the PULL names descriptors;
the second frame of a hello, received with its metadata, says which descriptor its channel came by. Send queues are
unlimited here (SNDHWM 0): credit bounds them.
"""

import asyncio
import logging
import os
import socket
from contextlib import nullcontext
from typing import Any

import zmq

from omni_flow.control.transport.base import MESSAGE_LIMIT, Codec, OnBatch, OnLost, Transport, within_limit
from omni_flow.control.transport.directory import SocketFile, claimed, private_directory, socket_path
from omni_flow.control.transport.errors import (
    AddressError,
    AddressInUse,
    ProtocolError,
    TransportClosed,
    VersionMismatch,
)
from omni_flow.control.transport.packets import hello, read_hello, sender
from omni_flow.control.transport.security import Doorkeeper, SharedKey, tcp_address
from omni_flow.control.transport.zmq_monitor import ENDS, Monitor
from omni_flow.control.transport.zmq_names import NAME_BYTES, Names, precedes
from omni_flow.control.transport.zmq_refusal import Refusal
from omni_flow.control.transport.zmq_sockets import connected, unconnected

log = logging.getLogger(__name__)

_HELLO, _REFUSED = b"\0hello\0\0", b"\0refused"  # in the place of a name, which never begins with \0
_BUDGET_BYTES = 1024 * 1024  # one turn of reading
_PACKET_COST = 1024  # what a packet costs of that budget beside its bytes
_BUSY_TURNS = 64  # of reading without finding the PULL empty, after which a lost peer is said lost all the same
LAST_WORDS_S = 20.0  # how long a peer that we no longer reach may go on speaking to us before it is said lost
_CLOSED = "the peer closed the channel"


class _Peer:
    """One incarnation of the channel to and from an address."""

    __slots__ = ("address", "ended", "incoming", "incoming_fd", "monitor", "name", "push")

    def __init__(self, address: str) -> None:
        self.address = address
        self.push: zmq.Socket[bytes] | None = None
        self.monitor: Monitor | None = None
        self.name = b""  # of our channel to it
        self.incoming = b""  # name of its channel to us, while that is open
        self.incoming_fd = -1
        self.ended: str | None = None  # the cause, once a direction has ended


class ZmqTransport(Transport):
    """`ipc:///directory/name.sock` (directory of mode 0700, own user only) or `tcp://host:port` (port 0: any free)."""

    def __init__(self, url: str, codec: Codec, *, key: str | None = None) -> None:
        """Raises: AddressError, AddressTooLong, InsecureAddress, WeakKey."""
        self.address = url
        self._tcp = url.startswith("tcp://")
        self._key = SharedKey(key) if key is not None and self._tcp else None
        self._endpoint = self._checked(url)
        self._codec = codec
        self._encode, self._decode = codec.encode, codec.decode
        self._peers: dict[str, _Peer] = {}
        self._channels: dict[bytes, _Peer] = {}  # by the name of the incoming channel
        self._descriptors: dict[int, _Peer] = {}  # the same by the descriptor it comes by
        self._orphans: set[int] = set()  # descriptors that closed before their hello was read
        self._names = Names()
        self._refusals: dict[bytes, Refusal] = {}  # by the name of the channel, while its sender is not told
        self._ending: list[_Peer] = []  # lost as soon as the PULL is seen empty
        self._busy_turns = 0
        self._read_again = False
        self._file: SocketFile | None = None
        self._state = "was not started"

    def _checked(self, url: str) -> str:
        """`url` as ZeroMQ wants it."""
        if self._tcp:
            return tcp_address(url, keyed=self._key is not None).url
        socket_path(url, "ipc")
        return url

    async def start(self, on_batch: OnBatch, on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_batch, self._on_lost = on_batch, on_lost
        path = "" if self._tcp else socket_path(self.address, "ipc")
        if path:
            private_directory(os.path.dirname(path))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # a peer takes three
        self._doorkeeper = Doorkeeper(self._context, self._key) if self._key else None
        self._pull = self._socket(zmq.PULL)
        self._pull.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT + NAME_BYTES)
        if self._key:
            self._key.arm_listener(self._pull)
        if path:
            self._pull.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._listening = Monitor(self._loop, self._pull, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._listening.watch(self._incoming_event)
        self._state = ""
        try:
            with claimed(self.address, path, socket.SOCK_STREAM) if path else nullcontext():
                self._pull.bind(self._endpoint)
                self._file = SocketFile(path) if path else None
        except zmq.ZMQError as error:
            await self.close(0.0)
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(self.address) from error
            raise AddressError(self.address, f"cannot listen there: {error}") from error
        except BaseException:
            await self.close(0.0)
            raise
        self.address = self._pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop.add_reader(self._pull.FD, self._read)
        self._read()

    # ------------------------------------------------------------------ sending

    def send(self, address: str, batch: list[Any]) -> None:
        packet = self._encode(batch)
        peer = self._peers.get(address)
        if peer is not None and peer.push is not None and len(packet) <= MESSAGE_LIMIT:
            self._push(peer, packet)
            return
        if self._state:
            raise TransportClosed(self._state)
        packets = within_limit(self._codec, address, batch, packet)
        connected = self._connected(address)
        if connected is not None:
            for packet in packets:
                self._push(connected, packet)

    def _push(self, peer: _Peer, packet: bytes) -> None:
        if peer.push is None:
            return
        try:
            peer.push.send(peer.name + packet, zmq.NOBLOCK)
        except zmq.Again:  # unlimited queues: only a connection that ended refuses
            self._outgoing_ended(peer, "the connection closed")

    def _connected(self, address: str) -> _Peer | None:
        """The peer with an open PUSH; None if it is lost (and that will be said)."""
        peer = self._peers.get(address)
        if peer is not None and (peer.ended is not None or peer.push is not None):
            return None if peer.ended is not None else peer
        endpoint = self._checked_peer(address)
        if peer is None:
            peer = self._peers[address] = _Peer(address)
        this = peer

        def ended(event: int, _: int) -> None:
            self._outgoing_ended(this, ENDS[event])

        try:
            peer.push, peer.monitor = connected(self._loop, self._push_socket, endpoint, sum(ENDS), ended)
        except zmq.ZMQError as error:
            self._not_reached(peer, f"no connection to it can be opened: {error}")
            return None
        peer.name = self._names.next()
        try:
            peer.push.send_multipart([_HELLO + peer.name, hello(self.address)], zmq.NOBLOCK)
        except zmq.Again:  # refused already
            self._outgoing_ended(peer, "nobody listens there")
            return None
        return peer

    def _checked_peer(self, address: str) -> str:
        if self._tcp != address.startswith("tcp://"):
            raise AddressError(address, f"{self.address} reaches addresses of its own scheme only")
        return self._checked(address)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        return unconnected(self._context, kind, self._endpoint, self._key)

    def _push_socket(self) -> "zmq.Socket[bytes]":
        return self._socket(zmq.PUSH)

    # ------------------------------------------------------------------ receiving

    def _read(self) -> None:
        """Deliver what has come, then settle who is lost. Called when the descriptor wakes, or by itself."""
        self._read_again = False
        receive, channels, budget = self._pull.recv, self._channels, _BUDGET_BYTES
        empty = False
        try:
            while budget > 0 and not self._state:
                packet = receive(zmq.NOBLOCK)
                budget -= len(packet) + _PACKET_COST
                peer = channels.get(packet[:NAME_BYTES])
                if peer is None:
                    self._read_control(packet)
                    continue
                try:
                    batch = self._decode(memoryview(packet)[NAME_BYTES:])
                except Exception as error:  # whatever a codec raises for bytes that are no batch
                    self._refuse(peer, f"malformed packet: {type(error).__name__}: {error}")
                    continue
                self._on_batch(peer.address, batch)
        except zmq.Again:
            empty = True
        finally:  # also when a callback raised: the descriptor will not wake again for what is left
            if not empty:
                self._read_soon()
        if self._ending:
            self._busy_turns += not empty
            if empty or self._busy_turns > _BUSY_TURNS:
                self._settle()

    def _read_soon(self) -> None:
        if not self._read_again and not self._state:
            self._read_again = True
            self._loop.call_soon(self._read_if_open)

    def _read_if_open(self) -> None:
        if not self._state:
            self._read()

    def _read_control(self, packet: bytes) -> None:
        """A frame of no channel that is open."""
        word, rest = packet[:NAME_BYTES], packet[NAME_BYTES:]
        try:
            if word == _HELLO and len(rest) == NAME_BYTES and self._pull.getsockopt(zmq.RCVMORE):
                frame = self._pull.recv(zmq.NOBLOCK, copy=False)
                descriptor = int(frame.get(zmq.SRCFD))
                self._read_hello(rest, frame.bytes, descriptor)
            elif word == _REFUSED:
                said, _, reason = rest[NAME_BYTES:].partition(b"\0")
                peer = self._peers.get(sender(said))  # another version refuses us by its own
                if peer is not None and peer.name == rest[:NAME_BYTES]:
                    self._listening.drain()  # most often its channel to us has closed as well
                    self._finish(peer, f"refused by the peer: {reason.decode(errors='replace')}")
            elif word[:1] != b"\1":  # else the rest of a channel that was lost or forgotten
                raise ProtocolError("a frame of no channel")
        except VersionMismatch as error:
            log.warning("%s refuses %s: %s", self.address, error.address, error)
            self._tell(error.address, rest, descriptor, str(error))
        except ProtocolError as error:
            log.warning("%s drops what an unknown peer sent: %s", self.address, error)

    def _read_hello(self, name: bytes, said: bytes, descriptor: int) -> None:
        address = read_hello(said)
        try:
            self._checked_peer(address)
        except AddressError as error:
            raise ProtocolError(str(error)) from error
        self._listening.drain()  # what is said of this descriptor until now is of an older connection
        peer = self._peers.get(address)
        if peer is not None and (peer.incoming or peer.ended is not None):
            late = precedes(name, peer.incoming)
            self._finish(peer, peer.ended or "the peer opened a new connection")
            if late:  # what it brings is older than what was delivered
                self._tell(address, name, descriptor, "a younger channel came first")
                return
            peer = self._peers.get(address)
        if self._state:
            return
        if peer is None:
            peer = self._peers[address] = _Peer(address)
        peer.incoming, peer.incoming_fd = name, descriptor
        self._channels[name] = peer
        older = self._descriptors.get(descriptor)
        self._descriptors[descriptor] = peer
        if older is not None:  # closed, or this hello is of a connection that closed before that one opened
            self._tell(older.address, older.incoming, descriptor, _CLOSED)
            self._incoming_ended(older)
        if descriptor in self._orphans:
            self._orphans.discard(descriptor)
            self._incoming_ended(peer)

    # ------------------------------------------------------------------ ends

    def _incoming_event(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._orphans.discard(descriptor)
            return
        for refusal in [refusal for refusal in self._refusals.values() if refusal.descriptor == descriptor]:
            refusal.close()  # who sees its connection closed need not be told
        peer = self._descriptors.pop(descriptor, None)
        if peer is None:
            self._orphans.add(descriptor)
        else:
            self._incoming_ended(peer)

    def _incoming_ended(self, peer: _Peer) -> None:
        """Its connection closed. What it had sent may still be in the PULL."""
        peer.incoming_fd = -1
        self._end(peer, "the peer closed the connection")

    def _outgoing_ended(self, peer: _Peer, cause: str) -> None:
        """Our connection closed: so will the peer's, once it has said all, since it loses us as a whole.

        A peer that lives and that we do not reach knows nothing of it: it is told, if it can be.
        """
        if peer.push is not None:
            self._not_reached(peer, cause)

    def _not_reached(self, peer: _Peer, cause: str) -> None:
        self._end(peer, cause)
        self._listening.drain()  # one that died has closed its connection as well
        if peer.incoming_fd >= 0:
            self._tell(peer.address, peer.incoming, peer.incoming_fd, f"cannot answer: {cause}")
            self._loop.call_later(LAST_WORDS_S, self._give_up, peer)

    def _give_up(self, peer: _Peer) -> None:
        if self._peers.get(peer.address) is peer:
            self._finish(peer, peer.ended or "")

    def _end(self, peer: _Peer, cause: str) -> None:
        if peer.ended is None:
            peer.ended = cause
            self._close_push(peer)
        self._ending.append(peer)
        self._read_soon()

    def _settle(self) -> None:
        """The PULL is empty: those with nothing more to come are lost now."""
        self._busy_turns = 0
        ending, self._ending = self._ending, []
        for peer in ending:
            if peer.incoming_fd < 0 and self._peers.get(peer.address) is peer:
                self._finish(peer, peer.ended or "")

    def _finish(self, peer: _Peer, cause: str, told: str = _CLOSED) -> None:
        self._drop(peer, told)
        self._on_lost(peer.address, cause)

    def _refuse(self, peer: _Peer, cause: str) -> None:
        log.warning("%s refuses %s: %s", self.address, peer.address, cause)
        self._finish(peer, cause, told=cause)

    def _tell(self, address: str, name: bytes, descriptor: int, cause: str) -> None:
        """Say that its channel of that name, which comes by that descriptor, is dropped."""
        if descriptor in self._orphans or name in self._refusals or self._state:
            return
        try:
            endpoint = self._checked_peer(address)
        except AddressError as error:
            log.warning("%s cannot be told: %s", address, error)
            return
        frame = _REFUSED + name + hello(self.address) + b"\0" + cause.encode()[:1024]
        refusal = Refusal(self._loop, self._push_socket, endpoint, frame, descriptor)
        self._refusals[name] = refusal
        refusal.start(on_end=lambda: self._refusals.pop(name))

    def forget(self, address: str) -> None:
        peer = self._peers.get(address)
        if peer is not None:
            self._drop(peer, _CLOSED)

    def _drop(self, peer: _Peer, told: str) -> None:
        del self._peers[peer.address]
        self._channels.pop(peer.incoming, None)
        if self._descriptors.get(peer.incoming_fd) is peer:
            del self._descriptors[peer.incoming_fd]
        if peer.incoming_fd >= 0:
            self._tell(peer.address, peer.incoming, peer.incoming_fd, told)
        self._close_push(peer)

    def _close_push(self, peer: _Peer, linger_ms: int = 0) -> None:
        push, monitor, peer.push, peer.monitor = peer.push, peer.monitor, None, None
        if push is not None and monitor is not None:
            monitor.close()
            push.close(linger=linger_ms)

    async def close(self, deadline_s: float = 5.0) -> None:
        if self._state:
            return
        self._state = "is closed"
        for peer in list(self._peers.values()):
            own = peer.address == self.address  # who no longer reads
            self._close_push(peer, 0 if own else int(deadline_s * 1000))
        self._peers.clear()
        for refusal in list(self._refusals.values()):  # all see that the PULL is gone
            refusal.close()
        self._loop.remove_reader(self._pull.FD)
        self._listening.close()
        if self._file is not None:
            self._file.unlink()
        self._pull.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        await self._loop.run_in_executor(None, self._context.term)  # returns when all is sent or the linger is over
