"""Cutting a job's spans into chunks: the unit of request, checksum, acknowledgement and resumption. Pure."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from omni_flow.data.transfer.base import Spans

CHUNK_BYTES = 512 << 10
"""Small enough that a chunk is still in the cache between its copy and its checksum."""
MAX_CHUNK_BYTES = 16 << 20
MAX_PIECES = 512


class Chunk(NamedTuple):
    """Some spans of a job, moved by one request. `pieces` are (local offset, remote offset, length)."""

    pieces: tuple[tuple[int, int, int], ...]
    nbytes: int


def cut(spans: Spans, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Chunks that cover each byte of `spans` once and in order, none above `chunk_bytes` or `MAX_PIECES` pieces."""
    pieces: list[tuple[int, int, int]] = []
    room = chunk_bytes
    for local, remote, length in spans.tolist():
        while length:
            part = min(length, room)
            pieces.append((local, remote, part))
            local, remote, length, room = local + part, remote + part, length - part, room - part
            if not room or len(pieces) == MAX_PIECES:
                yield Chunk(tuple(pieces), chunk_bytes - room)
                pieces, room = [], chunk_bytes
    if pieces:
        yield Chunk(tuple(pieces), chunk_bytes - room)


class Chunks:
    """The chunks of a job that are still to be moved: those given back first, then fresh ones, cut when needed."""

    def __init__(self, spans: Spans, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._fresh = cut(spans, chunk_bytes)
        self._next: deque[Chunk] = deque()

    def peek(self) -> Chunk | None:
        """The chunk that `pop` would give, None when there is none."""
        if not self._next and (fresh := next(self._fresh, None)):
            self._next.append(fresh)
        return self._next[0] if self._next else None

    def pop(self) -> Chunk:
        """Take the chunk that `peek` has shown."""
        return self._next.popleft()

    def give_back(self, chunk: Chunk) -> None:
        """Move it again, before all others."""
        self._next.appendleft(chunk)

    def drop(self) -> None:
        """Forget all that is left."""
        self._next.clear()
        self._fresh = iter(())
