"""What goes into a forward of fixed rows: sizes, batches, and what the numbers of a row say it sees."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import chain, pairwise

import rows_kit
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_flow.compute.sglang.rows_inputs import MOST_ROWS, SEQUENCES, Placement, RowInputs, batches, size_for


@dataclass
class Session:
    number: int
    context: int
    rows: int
    places: torch.Tensor


@given(st.integers(1, 100_000))
def test_a_size_has_room_and_is_at_most_a_quarter_larger(rows: int) -> None:
    size = size_for(rows)
    assert rows <= size <= max(rows + 15, rows * 1.25)
    assert size_for(size) == size


def test_there_are_four_sizes_an_octave() -> None:
    assert {size_for(rows) for rows in range(513, 1025)} == {640, 768, 896, 1024}


@given(st.lists(st.integers(1, 2 * MOST_ROWS), min_size=1, max_size=40))
def test_batches_hold_every_session_once_and_no_more_than_fits(rows: list[int]) -> None:
    cuts = [rows[some] for some in batches(list(enumerate(rows)))]
    assert list(chain(*cuts)) == rows
    for some in cuts:
        assert 0 < len(some) <= SEQUENCES
        assert len(some) == 1 or sum(some) <= MOST_ROWS
    for some, following in pairwise(cuts):
        assert len(some) == SEQUENCES or sum(some) + following[0] > MOST_ROWS


@given(st.lists(st.integers(0, 3), max_size=30))
def test_a_session_is_in_a_forward_once_and_its_steps_keep_their_order(numbers: list[int]) -> None:
    cuts = [numbers[some] for some in batches([(number, 5) for number in numbers])]
    assert list(chain(*cuts)) == numbers
    assert all(len(set(some)) == len(some) for some in cuts)


def test_what_was_placed_last_is_not_placed_again_and_its_session_is_not_kept() -> None:
    inputs = RowInputs.empty(16, 8, torch.float32, [-1], torch.zeros(SEQUENCES * 40, dtype=torch.int64))
    placement = Placement()
    session = Session(1, 3, 4, torch.arange(16, 23))
    placement.set(inputs, [session], [bytes(4)])
    inputs.slots.zero_()
    placement.set(inputs, [session], [bytes(4)])
    assert not inputs.slots.any()
    placement.set(inputs, [session], [b"\x01" * 4])
    assert inputs.slots[:4].tolist() == [19, 20, 21, 22]
    kept = weakref.ref(session)
    del session
    assert kept() is None


@given(
    st.lists(st.tuples(st.integers(0, 40), st.lists(st.booleans(), min_size=1, max_size=20)), max_size=SEQUENCES),
    st.sampled_from([-1, 0, 7]),
)
@settings(deadline=None)
def test_bounds_say_what_a_row_sees(asked: list[tuple[int, list[bool]]], window: int) -> None:
    sessions, slot = [], 16
    for context, flags in asked:
        sessions.append(Session(len(sessions), context, len(flags), torch.arange(slot, slot + context + len(flags))))
        slot += context + len(flags)
    context_slots = torch.zeros(SEQUENCES * 40, dtype=torch.int64)
    inputs = RowInputs.empty(size_for(SEQUENCES * 20), 8, torch.float32, [window], context_slots)
    inputs.place([Session(9, 3, 9, torch.arange(12))], [bytes(9)])  # what stood there before leaves nothing
    inputs.place(sessions, [bytes(flags) for _, flags in asked])
    starts, contexts = inputs.starts.tolist(), inputs.context_starts.tolist()
    for at, session in enumerate(sessions):
        rows = slice(starts[at], starts[at + 1])
        assert inputs.slots[rows].tolist() == session.places[session.context :].tolist()
        assert inputs.context[contexts[at] : contexts[at + 1]].tolist() == session.places[: session.context].tolist()
        length = session.context + session.rows
        assert inputs.positions[rows].tolist() == list(range(session.context, length))
        last, fixed, first = inputs.bounds[window][:, rows, None]
        keys = torch.arange(length)
        sees = (keys <= last) & ((keys >= fixed) | (keys >= first))
        flags = asked[at][1]
        assert torch.equal(sees, rows_kit.bias(length, session.rows, flags, window + 1)[0, 0, session.context :] == 0)
    # padding is the last sequence: no context, one key, and its KV goes to the padding page
    used = sum(session.rows for session in sessions)
    assert starts[SEQUENCES:] == [used, inputs.size]
    assert contexts[SEQUENCES] == contexts[SEQUENCES + 1]
    assert not inputs.slots[used:].any()
    assert not inputs.bounds[window][0, used:].any()
