"""The descriptor of an arena, for those who map it themselves: the transfer driver, and short-lived weight segments."""

from omni_flow.data.client import MemoryManagerClient, UnixLink, failure_of
from omni_flow.data.errors import BadMessage, CallTimeout
from omni_flow.data.messages import ArenaInfo, ArenaRef
from omni_flow.data.protocol import ERROR, Op, encode


def arena_descriptor(client: MemoryManagerClient, name: str, *, write: bool) -> tuple[ArenaInfo, int]:
    """Ask for an arena over a short connection of its own, in the name of the client's session.

    Returns: what it is, and a descriptor that is the caller's to close, -1 for `cuda-ipc`. Raises: DataError, what the
    manager says.
    """
    ref = ArenaRef(name, write, client.welcome.session, client.welcome.secret)
    side = UnixLink(client.welcome.path)
    try:
        side.send(encode(Op.ARENA, 0, 1, 0, ref))
        reply = side.receive(client.timeout)
    finally:
        side.close()
    if reply is None:
        raise CallTimeout(f"no descriptor of arena {name} within {client.timeout} s")
    if reply.flags & ERROR:
        raise failure_of(reply)
    info = reply.body(ArenaInfo)
    if len(reply.fds) != (not info.handle):
        raise BadMessage(f"arena {name} came with {len(reply.fds)} descriptors")
    return info, reply.fds[0] if reply.fds else -1
