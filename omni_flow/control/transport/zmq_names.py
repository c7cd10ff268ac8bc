"""Names of ZeroMQ channels: no two alike, a sender's own in the order in which it opened them. Pure, no sockets."""

import os

NAME_BYTES = 8
_COUNT_BYTES = 2
_COUNTS = 1 << 8 * _COUNT_BYTES


class Names:
    """The names of one sender: a byte that is not \\0, who it is (random), a count that begins anew after 65,535."""

    def __init__(self) -> None:
        self._sender = b"\1" + os.urandom(NAME_BYTES - 1 - _COUNT_BYTES)
        self._count = 0

    def next(self) -> bytes:
        self._count = (self._count + 1) % _COUNTS
        return self._sender + self._count.to_bytes(_COUNT_BYTES)


def precedes(name: bytes, other: bytes) -> bool:
    """Whether both are of one sender, which opened `other` after `name`. False for what is no name."""
    if name == other or len(other) != NAME_BYTES or name[:-_COUNT_BYTES] != other[:-_COUNT_BYTES]:
        return False
    ahead = int.from_bytes(other[-_COUNT_BYTES:]) - int.from_bytes(name[-_COUNT_BYTES:])
    return ahead % _COUNTS < _COUNTS // 2
