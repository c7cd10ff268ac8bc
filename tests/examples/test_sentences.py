from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from voice_vision_chat.sentences import Sentences

PIECES = st.lists(
    st.sampled_from(
        [
            " Paris",
            "Dr",
            ".",
            "!",
            "?",
            "...",
            "\n",
            "\n\n",
            " ",
            "",
            " e",
            ".g",
            "1",
            " 3",
            '"',
            ")",
            " The",
            " a",
            ". ",
        ]
    ),
    max_size=40,
)


def windows(frames: Sequence[str], max_frames: int = 64) -> list[list[str]]:
    """Drives the policy as a stream does: once for each arriving frame, then for the end."""
    policy = Sentences(max_frames)
    starts = [0]
    for known in range(1, len(frames) + 1):
        while starts[-1] < known and (stop := policy.cut(frames[:known], starts[-1], False)) is not None:
            starts.append(stop)
    while starts[-1] < len(frames):
        stop = policy.cut(frames, starts[-1], True)
        starts.append(len(frames) if stop is None else stop)
    return [list(frames[a:b]) for a, b in pairwise(starts)]


def joined(frames: Sequence[str], max_frames: int = 64) -> list[str]:
    return ["".join(window) for window in windows(frames, max_frames)]


def test_two_sentences_are_two_windows() -> None:
    frames = ["The", " capital", " is", " Paris", ".", " It", " is", " old", "."]
    assert joined(frames) == ["The capital is Paris.", " It is old."]


def test_a_full_stop_waits_for_the_next_frame() -> None:
    policy = Sentences()
    assert policy.cut(["Pi", " is", " 3", "."], 0, False) is None
    assert policy.cut(["Pi", " is", " 3", ".", "14"], 0, False) is None
    assert policy.cut(["Pi", " is", " 3", ".", " Yes"], 0, False) == 4


def test_a_frame_that_ends_in_white_space_needs_no_next_frame() -> None:
    assert Sentences().cut(["Yes", ". "], 0, False) == 2


@pytest.mark.parametrize("mark", [".", "!", "?", "...", "…", "?!", '."', ".)", "!”"])
def test_each_closing_mark_ends_a_sentence(mark: str) -> None:
    assert joined(["So", " it", " is", mark, " Then"]) == [f"So it is{mark}", " Then"]


@pytest.mark.parametrize("head", ["Dr", "e.g", "etc", "J", "U.S"])
def test_an_abbreviation_or_initial_ends_no_sentence(head: str) -> None:
    assert joined([f"Ask {head}", ".", " Smith", " now", "."]) == [f"Ask {head}. Smith now."]


def test_a_list_number_ends_no_sentence_but_a_number_in_a_sentence_does() -> None:
    assert joined(["1", ".", " Wash", " it", "."]) == ["1. Wash it."]
    assert joined(["It", " costs", " 12", ".", " Pay"]) == ["It costs 12.", " Pay"]


def test_a_line_break_ends_a_sentence() -> None:
    assert joined(["Title", "\n\n", "Text", " here"]) == ["Title\n\n", "Text here"]


def test_leading_white_space_alone_is_no_sentence() -> None:
    assert joined(["\n", " ", "Hello", "."]) == ["\n Hello."]


def test_the_end_flushes_the_rest() -> None:
    assert Sentences().cut(["no", " mark"], 0, True) == 2
    assert Sentences().cut(["no", " mark"], 2, True) is None


def test_a_window_is_cut_at_max_frames() -> None:
    assert joined([" la"] * 7, max_frames=3) == [" la la la", " la la la", " la"]


def test_max_frames_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_frames is 0"):
        Sentences(0)


@given(PIECES, st.integers(1, 8))
def test_windows_hold_every_frame_once_in_order_and_within_max_frames(frames: list[str], most: int) -> None:
    cut = windows(frames, most)
    assert [frame for window in cut for frame in window] == frames
    assert all(1 <= len(window) <= most for window in cut)


@given(PIECES, st.integers(1, 8), st.data())
def test_later_frames_and_the_end_never_change_a_cut(frames: list[str], most: int, data: st.DataObject) -> None:
    policy = Sentences(most)
    start = data.draw(st.integers(0, len(frames)))
    known = data.draw(st.integers(start, len(frames)))
    stop = policy.cut(frames[:known], start, False)
    if stop is not None:
        assert start < stop <= known
        assert policy.cut(frames, start, False) == stop
        assert policy.cut(frames[:known], start, True) == stop
        assert policy.cut(frames, start, True) == stop


@given(PIECES, st.data())
def test_frames_before_the_start_are_not_looked_at(frames: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(frames)))
    alone = Sentences().cut(frames[start:], 0, False)
    assert Sentences().cut(frames, start, False) == (None if alone is None else alone + start)
