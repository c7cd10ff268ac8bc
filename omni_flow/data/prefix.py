"""The longest usable prefix over several attention groups. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def longest_prefix(hits: Sequence[Mask], windows: Sequence[int]) -> int:
    """Number of pages of the longest prefix that every group can serve.

    Args:
        hits: per group and page, whether the page is there.
        windows: per group 0 when all pages of the prefix are needed, else how many of its last pages are
            (sliding window, recurrent state: 1).
    """
    limit = min((len(hit) for hit in hits), default=0)
    for hit, window in zip(hits, windows, strict=True):
        if not window and limit:
            head = hit[:limit]
            at = int(head.argmin())
            if not head[at]:
                limit = at
    if not limit or not any(windows):
        return limit
    numbers = np.arange(1, limit + 1)
    usable = np.ones(limit, np.bool_)
    for hit, window in zip(hits, windows, strict=True):
        if window:
            last_miss = np.maximum.accumulate(np.where(hit[:limit], 0, numbers))
            usable &= numbers - last_miss >= np.minimum(numbers, window)
    at_most = np.flatnonzero(usable)
    return int(at_most[-1]) + 1 if len(at_most) else 0


def first_needed(pages: int, window: int) -> int:
    """First page of a prefix of `pages` that a group with this window needs."""
    return max(0, pages - window) if window else 0
