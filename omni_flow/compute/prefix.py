"""Where a sequence meets what is cached. Pure: no torch, no clock, no I/O.

* `PageChain`: the hashes of a sequence's full pages, made as its tokens come.
* `MatchRule`: where a model lets a match end. Pages are reused whole, so a match is the largest allowed whole page.
* `History`: what a session has said so far. A client that refers to outputs it was given names an offset and the hash
  there instead of sending everything again (incremental matching); the server cuts, checks, and goes on from the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_flow.compute.errors import ComputeError
from omni_flow.data.identity import MediaDigest, MediaSpan, PageHash, page_hashes


class HistoryDiffers(ComputeError):
    """The client's history is not the server's: the hash it names is another, or lies beyond what there is."""


MatchRule = Callable[[int, Sequence[MediaSpan]], int]
"""(tokens that could match, media of the sequence) → tokens that may match, at most as many."""


def anywhere(tokens: int, media: Sequence[MediaSpan]) -> int:
    """Any prefix is as good as any other: causal text models."""
    return tokens


def not_inside_media(tokens: int, media: Sequence[MediaSpan]) -> int:
    """A match that would end inside a span ends before it: its rows attend to each other in both directions, so a part
    of them is worth nothing without the rest (HunyuanImage-3)."""
    for span in media:
        if span.start < tokens < span.start + span.length:
            return span.start
    return tokens


def before(spans: Iterable[MediaDigest]) -> MatchRule:
    """A match ends before the first of these spans, whose rows are never reusable (rows under denoising)."""
    never = frozenset(spans)

    def rule(tokens: int, media: Sequence[MediaSpan]) -> int:
        starts = [span.start for span in media if span.digest in never]
        return min([tokens, *starts])

    return rule


def both(*rules: MatchRule) -> MatchRule:
    """What all the rules allow."""

    def rule(tokens: int, media: Sequence[MediaSpan]) -> int:
        while True:
            allowed = min(one(tokens, media) for one in rules)
            if allowed == tokens:
                return tokens
            tokens = allowed

    return rule


def match_end(tokens: int, media: Sequence[MediaSpan], page_size: int, rule: MatchRule = anywhere) -> int:
    """The longest match of at most `tokens` tokens: whole pages, ending where the rule allows."""
    end = tokens // page_size * page_size
    while end > 0:
        allowed = rule(end, media) // page_size * page_size
        if allowed == end:
            break
        end = allowed
    return max(end, 0)


class PageChain:
    """Page keys of one sequence.

    Args:
        root: of the namespace.
        media: spans by position in the whole sequence.

    `limit`, if set, is where the part ends that its tokens and media determine; there are no keys beyond it.
    """

    __slots__ = ("keys", "limit", "media", "root")

    def __init__(self, root: PageHash, media: Sequence[MediaSpan] = ()) -> None:
        self.root = root
        self.media = tuple(media)
        self.keys: list[PageHash] = []
        self.limit: int | None = None

    def upto(self, tokens: Any, count: int, page_size: int) -> list[PageHash]:
        """Keys of the full pages of the first `count` tokens; what was hashed before is not hashed again.

        Args:
            tokens: a sequence of ids of which no token that was given before has changed.
        """
        pages, done = (count if self.limit is None else min(count, self.limit)) // page_size, len(self.keys)
        if done < pages:
            start = done * page_size
            new = np.asarray(tokens[start : pages * page_size], np.int64).astype(np.uint32)
            self.keys += page_hashes(self.keys[-1] if done else self.root, new, page_size, _from(self.media, start))
        return self.keys[:pages]


def marks(keys: Sequence[PageHash], page_size: int, most: int = 16) -> list[tuple[int, bytes]]:
    """(tokens up to there, key) of at most `most` pages, evenly spaced, the last one among them."""
    step = -(-len(keys) // most) or 1
    ends = range(len(keys), 0, -step)
    return [(end * page_size, keys[end - 1]) for end in reversed(ends)]


def _from(media: Sequence[MediaSpan], start: int) -> list[MediaSpan]:
    """The spans that reach beyond `start`, counted from there."""
    return [MediaSpan(m.start - start, m.length, m.digest) for m in media if m.start + m.length > start]


@dataclass(slots=True)
class History:
    """What one session has said and been told: tokens, media and the page keys of both.

    Args:
        root: of the namespace.
    """

    root: PageHash
    page_size: int
    ids: list[int] = field(default_factory=list)
    media: list[MediaSpan] = field(default_factory=list)
    _keys: list[PageHash] = field(default_factory=list)

    def hash_at(self, offset: int) -> PageHash:
        """Stands for the first `offset` tokens and everything they depend on; the root where there are none.

        Raises:
            HistoryDiffers: the history is shorter.
        """
        if not 0 <= offset <= len(self.ids):
            raise HistoryDiffers(
                f"offset {offset} of a history of {len(self.ids)} tokens", "send the whole input of this turn"
            )
        whole = offset // self.page_size
        chain = PageChain(self.root, self.media)
        chain.keys = self._keys
        keys = chain.upto(self.ids, offset, self.page_size)
        at = keys[-1] if keys else self.root
        if offset % self.page_size:
            start = whole * self.page_size
            rest = np.asarray(self.ids[start:offset], np.int64).astype(np.uint32)
            media = [m for m in _from(self.media, start) if m.start < len(rest)]
            at = page_hashes(at, rest, self.page_size, media, partial=True)[-1]
        return at

    def cut(self, offset: int, expected: PageHash) -> None:
        """Forget what comes after `offset`, given that the client means the same tokens by it.

        Raises:
            HistoryDiffers: it does not, or the cut would go through a span of media.
        """
        if self.hash_at(offset) != expected:
            raise HistoryDiffers(
                f"the hash at offset {offset} is not the client's", "send the whole input of this turn"
            )
        for span in self.media:
            if span.start < offset < span.start + span.length:
                raise HistoryDiffers(
                    f"offset {offset} lies in the media at {span.start} to {span.start + span.length}",
                    "cut before or behind it",
                )
        del self.ids[offset:]
        del self._keys[offset // self.page_size :]
        self.media[:] = [span for span in self.media if span.start < offset]

    def extend(self, ids: Sequence[int], media: Sequence[MediaSpan] = ()) -> None:
        """Append tokens; the spans count from the first of them."""
        start = len(self.ids)
        self.ids.extend(ids)
        self.media.extend(MediaSpan(start + span.start, span.length, span.digest) for span in media)
