"""A window policy that cuts a stream of text into sentences: each is spoken while the next is being written."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CLOSERS = "\"'”’)]*_"
_END = re.compile(rf"(\S*?)([.!?…]+)[{re.escape(_CLOSERS)}]*\s*\Z")
_ABBREVIATIONS = frozenset(
    ["mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "vs", "etc", "approx", "dept"]
    + ["e.g", "i.e", "a.m", "p.m", "u.s", "u.k"]
)


class Sentences:
    """Windows of whole sentences over frames that are pieces of text.

    A sentence stops behind the first frame where the text of the window ends in `.`, `!`, `?` or `…` (closing quotes,
    brackets and white space may follow) and the next frame starts with white space; or behind a frame that ends in a
    line break. A full stop behind an abbreviation ("Dr."), an initial ("J.") or a list number ("1.") ends no
    sentence. Leading white space belongs to the window it starts. A window never holds more than `max_frames` frames.

    Pure: the answer depends on the frames alone, and once a window is cut no later frame changes it. Where the next
    frame decides, the answer is None until it is there.
    """

    def __init__(self, max_frames: int = 64) -> None:
        """Raises ValueError if `max_frames` is less than 1."""
        if max_frames < 1:
            raise ValueError(f"max_frames is {max_frames}: a window holds at least one frame, give 1 or more")
        self.max_frames = max_frames

    def cut(self, frames: Sequence[str], start: int, ended: bool) -> int | None:
        """Where the window that begins at `start` stops (exclusive), or None for "not yet".

        After the end (`ended`) None means "the rest". Never looks at frames before `start`.
        """
        limit = min(len(frames), start + self.max_frames)
        text = ""
        for stop in range(start + 1, limit + 1):
            text += frames[stop - 1]
            if not text.strip():
                continue
            if _ends_line(text):
                return stop
            if not _ends_sentence(text):
                continue
            if text[-1].isspace() or (stop < len(frames) and frames[stop][:1].isspace()):
                return stop
        if limit - start == self.max_frames:
            return limit
        return len(frames) if ended and limit > start else None


def _ends_line(text: str) -> bool:
    return text.rstrip(" \t").endswith("\n")


def _ends_sentence(text: str) -> bool:
    found = _END.search(text)
    if found is None:
        return False
    word, mark = found.groups()
    if mark != ".":
        return True
    word = word.lstrip("\"'“‘([*_").lower()
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    return not (word in _ABBREVIATIONS or is_initial or (text.strip() == f"{word}." and word.isdigit()))
