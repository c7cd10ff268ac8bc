"""What the `cache_aware` balance goes by: the pieces of a request's inputs, and who holds what was made of them. Pure.

A piece is named by a hash of itself and of all before it, as the pages of a KV cache are, so equal names mean equal
prefixes. `Routed` knows who holds a prefix from what was sent where. A view of what is really held (by the memory
managers) is another `Holders`: it learns from roles which KV pages a request's inputs became.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import xxhash

PIECE: Final = 256
"""Bytes of a piece: about 64 tokens of English text."""

Key = int | bytes


def pieces_of(inputs: Mapping[str, Any], tenant: str = "") -> list[Key]:
    """The chained hashes of the full pieces of a request's inputs, in the order given.

    Text and bytes count as they are, lists and dicts of plain values (token ids, messages) as JSON. Anything else (an
    array, a picture) ends the chain before it. Requests of different tenants have no piece in common.
    """
    content = b""
    for name, value in inputs.items():
        raw = _raw(value)
        if raw is None:
            break
        content += b"%d %b " % (len(name), name.encode()) + raw
    key = xxhash.xxh3_64_intdigest(tenant.encode())
    keys: list[Key] = []
    for start in range(0, len(content) - PIECE + 1, PIECE):
        key = xxhash.xxh3_64_intdigest(content[start : start + PIECE], key)
        keys.append(key)
    return keys


def _raw(value: object) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, (list, dict)):
        try:
            return msgspec.json.encode(value)
        except (TypeError, ValueError):  # it holds something without a plain form
            return None
    return None


class Prefix(NamedTuple):
    """Where the KV of a request's inputs lies, said by the role that made it (`ctx.prefix`).

    Args:
        pool: of the memory manager.
        marks: (tokens up to there, key of the page that ends there) at some places of the prompt, in order.
    """

    pool: str
    marks: Sequence[tuple[int, bytes]]


class Holders(Protocol):
    """Who holds which prefix."""

    def held(self, keys: Sequence[Key], replicas: Sequence[str]) -> Mapping[str, int]:
        """Replica → how many of the leading `keys` it holds; 0 may be left out."""

    def sent(self, keys: Sequence[Key], replica: str) -> None:
        """A request with these keys goes to `replica`, which will hold them."""

    def learned(self, keys: Sequence[Key], prefix: Prefix) -> None:
        """The inputs with these keys became that KV."""


class Routed:
    """`Holders` from what was sent where.

    Args:
        room: pieces that a replica keeps; beyond it, those sent longest ago count as gone, of one request the last ones
            first. Too large, and prompts are sent after prefixes that were evicted; too small, and ones that are there
            are computed again elsewhere. The default fits a KV cache of about 260,000 tokens a replica.
    """

    def __init__(self, room: int = 4096) -> None:
        self._room = room
        self._of: dict[str, OrderedDict[Key, None]] = {}

    def held(self, keys: Sequence[Key], replicas: Sequence[str]) -> dict[str, int]:
        for gone in self._of.keys() - set(replicas):
            del self._of[gone]
        found = {}
        for replica, there in self._of.items():
            found[replica] = next((at for at, key in enumerate(keys) if key not in there), len(keys))
        return found

    def sent(self, keys: Sequence[Key], replica: str) -> None:
        there = self._of.setdefault(replica, OrderedDict())
        for key in reversed(keys):
            there[key] = None
            there.move_to_end(key)
        while len(there) > self._room:
            there.popitem(last=False)

    def learned(self, keys: Sequence[Key], prefix: Prefix) -> None:
        """What was sent is all that counts here."""
