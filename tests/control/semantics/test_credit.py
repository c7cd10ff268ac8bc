"""Creators' credit against a plain model: a number is open until each reader has acknowledged it, however often."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from omni_flow.control.credit import Account

STEPS = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 6), st.integers(0, 3))), max_size=60)


@given(STEPS, st.integers(1, 3), st.integers(1, 4))
def test_a_number_is_open_until_all_readers_acknowledged_it(
    steps: list[tuple[int, int] | None], limit: int, readers: int
) -> None:
    account = Account(limit, readers)
    acked: dict[int, set[int]] = defaultdict(set)
    created = 0
    for step in steps:
        if step is None:
            if account.may_create():
                assert account.create() == created
                created += 1
        else:
            number, reader = step
            if reader < readers:
                account.ack(number, (reader, 0))
                acked[number].add(reader)
        model = {number for number in range(created) if len(acked[number]) < readers}
        assert account.open == len(model)
        assert account.may_create() == (len(model) < limit)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 20), st.integers(1, 3))
def test_bytes_bound_what_is_open_beyond_the_floor(sizes: list[int], byte_limit: int, floor: int) -> None:
    account = Account(100, 1, byte_limit, floor)
    opened: list[int] = []
    for size in sizes:
        while not account.may_create():
            account.ack(opened.pop(0), (0, 0))
        opened.append(account.create(size))
        assert account.open <= floor or account.open_bytes < byte_limit + size
    for number in opened:
        account.ack(number, (0, 0))
    assert (account.open, account.open_bytes) == (0, 0)
