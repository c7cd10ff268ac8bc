"""How sockets of ZeroMQ are set here, and connected."""

import asyncio
from collections.abc import Callable

import zmq

from omni_flow.control.transport.security import SharedKey
from omni_flow.control.transport.zmq_monitor import Monitor

_HEARTBEAT_MS, _SILENCE_MS, _CONNECT_MS = 5_000, 20_000, 5_000  # tcp: a machine that vanished says nothing


def unconnected(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, listener: str, key: SharedKey | None
) -> "zmq.Socket[bytes]":
    """A PULL or PUSH of a transport that listens at `listener`.

    Raises:
        ZMQError: this process may open no more files.
    """
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    if listener.startswith("tcp://"):
        sock.setsockopt(zmq.IPV6, int("[" in listener))
        sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        sock.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    if kind == zmq.PUSH:
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        if key:
            key.arm_sender(sock)
    return sock


def connected(
    loop: asyncio.AbstractEventLoop,
    make: Callable[[], "zmq.Socket[bytes]"],
    endpoint: str,
    events: int,
    on_event: Callable[[int, int], None],
) -> tuple["zmq.Socket[bytes]", Monitor]:
    """A PUSH that `make` makes, connecting to `endpoint`, and its monitor.

    Raises:
        ZMQError: this process may open no more files.
    """
    push, monitor = make(), None
    try:
        monitor = Monitor(loop, push, events)
        monitor.watch(on_event)
        push.connect(endpoint)
    except BaseException:
        if monitor is not None:
            monitor.close()
        push.close(linger=0)
        raise
    return push, monitor
