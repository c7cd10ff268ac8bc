"""Where the reference cuts a stream into windows: by size, by a policy, or where a clock is said to have cut it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omni_flow.control.spec import SlotSpec


class InvalidChoiceError(ValueError):
    """A group said to have won a race can never be ready, or the interface has no race; or windows of a timed policy
    are said to be what no clock could make of their stream.
    """


@dataclass(frozen=True, slots=True)
class Cuts:
    """Windows as a clock cut them: how many frames the first ones got (without left context), how many there are."""

    sizes: Sequence[int] = ()
    count: int | None = None


def is_timed(slot: SlotSpec) -> bool:
    """Whether a slot is a window of a policy that looks at a clock."""
    return slot.policy is not None and bool(getattr(slot.policy, "timed", False))


def cut(slot: SlotSpec, frames: Sequence[Any], torn: bool, told: Cuts) -> Iterator[tuple[int, int]]:
    """(start, stop) of each window of a slot over the present frames; `told` is for policies that look at a clock.

    Raises:
        InvalidChoiceError: no clock can have cut them as told.
    """
    if is_timed(slot):
        return _cut_by_clock(slot, frames, torn, told)
    return (_cut_by_size if slot.policy is None else _cut_by_policy)(slot, frames, torn)


def _cut_by_size(slot: SlotSpec, frames: Sequence[Any], torn: bool) -> Iterator[tuple[int, int]]:
    """Windows `w*stride - left` to `w*stride + size`; the tail only if it holds a frame no window had."""
    have = len(frames)
    window = 0
    while True:
        start, stop = window * slot.stride, window * slot.stride + slot.size
        if stop > have:
            covered = stop - slot.stride if window else 0
            if torn or start >= have or have <= covered:
                return
        yield max(0, start - slot.left), min(stop, have)
        window += 1


def _cut_by_policy(slot: SlotSpec, frames: Sequence[Any], torn: bool) -> Iterator[tuple[int, int]]:
    """Windows where the policy cuts: asked at each frame, and after the end where None means the rest."""
    assert slot.policy is not None
    start = 0
    for known in range(1, len(frames) + 1):
        while start < known:
            stop = slot.policy.cut(frames[:known], start, False)
            if stop is None:
                break
            yield max(0, start - slot.left), stop
            start = stop
    while not torn and start < len(frames):
        stop = slot.policy.cut(frames, start, True)
        stop = len(frames) if stop is None else stop
        yield max(0, start - slot.left), stop
        start = stop


def _cut_by_clock(slot: SlotSpec, frames: Sequence[Any], torn: bool, told: Cuts) -> Iterator[tuple[int, int]]:
    """Windows of the sizes told; those of which only the number is known, as large as may be."""
    assert slot.policy is not None
    most = slot.policy.max_frames
    rest = len(frames) - sum(told.sizes)
    sizes = list(told.sizes)
    while (len(sizes) < told.count) if told.count is not None else (rest > 0 and not torn):
        left = 1 if told.count is None else told.count - len(sizes)
        sizes.append(min(most, rest - left + 1))
        rest -= sizes[-1]
    if rest < 0 or (rest and not torn) or not all(1 <= size <= most for size in sizes):
        raise InvalidChoiceError(
            f"windows of {slot.field} of sizes {sizes}, of {len(frames)} frames and {most} at most"
        )
    start = 0
    for size in sizes:
        yield max(0, start - slot.left), start + size
        start += size
