"""Arrays that don't travel in messages: the seam to a data plane, and the payloads that refer to it.

The deployment injects `Tensors`. A payload whose arrays were placed is `Spilled` at its producer: how many will read it
is known once its message has been queued for all of them, and it is published when it first goes out. Its bytes name
the arrays by number, the references follow in the same message in that order. At each reader it is `Leased`, which
holds the arrays as long as it, or an array made from it, lives; a message that is dropped unread gives its lease back
by being forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from omni_flow.control.arrays import ArrayError
from omni_flow.control.codec import ONE_ARRAY, Codec, MalformedPayload
from omni_flow.control.types import Type
from omni_flow.refs import TensorRef


class TensorGone(Exception):
    """A reference can't be held: its memory has been given to something else, or this process may hold no more."""


class Placed(Protocol):
    """An array in the data plane that nobody knows of yet."""

    ref: TensorRef

    def publish(self, consumers: int) -> None:
        """Hand it to so many readers."""

    def discard(self) -> None:
        """Nobody will read it."""


class Taken(Protocol):
    """A reader's hold on a placed array; goes when it and its arrays are forgotten."""

    def array(self, torch: bool) -> Any:
        """A read-only numpy array, or a tensor, over the memory."""


class Tensors(Protocol):
    """What the runtime needs from a data plane. All but `Taken.array` is called on the event loop."""

    def place(self, array: Any) -> Placed | None:
        """Put a numpy array or CPU tensor into the data plane, uncopied if it was computed there. None: no room."""

    def take(self, ref: TensorRef) -> Taken:
        """Hold a published array. Raises TensorGone."""

    def settle(self, refs: Sequence[TensorRef]) -> None:
        """Own published arrays that nobody takes from now on: they are free once those who hold them are done."""


class Spilled:
    """A payload with placed arrays, at its producer. `consumers` counts the messages that carry it."""

    __slots__ = ("_placed", "_published", "consumers", "data", "nbytes", "refs")

    def __init__(self, data: bytes, placed: list[Placed]) -> None:
        self.data = data
        self.consumers = 0
        self.refs = [p.ref for p in placed]
        nbytes = len(data)
        for ref in self.refs:
            nbytes += ref.nbytes
        self.nbytes = nbytes
        """Bytes of the payload with its arrays."""
        self._placed = placed
        self._published = False

    def sending(self) -> bytes:
        """The bytes to send. Publishes the arrays the first time, to as many as have been counted."""
        if not self._published:
            self._published = True
            for placed in self._placed:
                placed.publish(self.consumers)
        return self.data

    def __del__(self) -> None:
        if not self._published:
            for placed in self._placed:
                placed.discard()


class Leased:
    """A payload with placed arrays, at a reader."""

    __slots__ = ("_gone", "_held", "data")

    def __init__(self, data: bytes, refs: Sequence[TensorRef], tensors: Tensors | None) -> None:
        self.data = data
        self._held: list[Taken] = []
        self._gone = ""
        if tensors is None:
            self._gone = f"it lies on node {refs[0].node}, but this process has no memory manager"
            return
        for ref in refs:
            try:
                self._held.append(tensors.take(ref))
            except TensorGone as gone:  # the others are taken nevertheless, to be given back
                self._gone = str(gone)

    def decode(self, type_: Type | None) -> Any:
        """The value, its arrays over the memory held. Any thread. Raises MalformedPayload."""
        if self._gone:
            raise MalformedPayload(f"an array of this payload can't be read: {self._gone}")
        if self._held and self.data == ONE_ARRAY:
            return _checked(self._held[0].array(False), type_)
        _decoding.held = self._held
        try:
            return _over_held.decode(self.data, type_)
        finally:
            _decoding.held = ()


class _Decoding(threading.local):
    """What the payload that this thread decodes holds. A codec is in a cycle with itself, so it must not own any."""

    held: Sequence[Taken] = ()


_decoding = _Decoding()


def _fetch(number: int, torch: bool) -> Any:
    held = _decoding.held
    if number >= len(held):
        raise ArrayError(f"array {number} of a payload that came with {len(held)}")
    return held[number].array(torch)


_over_held = Codec(fetch=_fetch)


def _checked(array: Any, type_: Type | None) -> Any:
    text = None if type_ is None else type_.mismatch(array)
    if text is not None:
        raise MalformedPayload(f"no payload of type {type_}: {text}")
    return array


def ref_of(item: Sequence[Any]) -> TensorRef:
    """A reference as it comes in a message. Raises TypeError or ValueError."""
    tag, node, arena, offset, nbytes, generation, dtype, shape = item
    if tag != "t":
        raise ValueError(f"not a reference to an array: {item!r:.80}")
    return TensorRef(node, arena, offset, nbytes, generation, dtype, tuple(shape))
