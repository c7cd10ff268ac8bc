"""Messages: what goes in comes out, and nothing but `BadMessage` comes of nonsense."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_flow.data.errors import BadMessage, Holder, PoolFull, from_code
from omni_flow.data.messages import Hello, Lookup, Reserve
from omni_flow.data.protocol import MAX_MESSAGE, Op, decode, encode, keys_array, peek

COLUMNS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 255), max_size=20).map(lambda x: np.array(x, np.uint8)),
        st.lists(st.integers(0, 2**32 - 1), max_size=20).map(lambda x: np.array(x, np.uint32)),
        st.lists(st.integers(0, 2**64 - 1), max_size=20).map(lambda x: np.array(x, np.uint64)),
        st.lists(st.binary(min_size=32, max_size=32), max_size=6).map(keys_array),
    ),
    max_size=5,
)


@given(st.text(max_size=50), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), COLUMNS)
def test_a_message_survives_the_way(name: str, request: int, epoch: int, columns: list[np.ndarray]) -> None:
    raw = encode(Op.HELLO, 0, request, epoch, Hello("client", name), columns)
    message = decode(raw, len(raw))
    assert (message.op, message.request, message.epoch) == (Op.HELLO, request, epoch)
    assert message.body(Hello).name == name
    assert len(message.columns) == len(columns)
    for got, given_ in zip(message.columns, columns, strict=True):
        assert got.tobytes() == given_.tobytes()
        assert got.shape == given_.shape or got.size == 0


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_nothing_else(raw: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(raw, len(raw)).body(Reserve)
    peek(raw, len(raw))


@given(COLUMNS, st.data())
def test_damaged_messages_are_refused_or_read_as_what_they_say(columns: list[np.ndarray], data: st.DataObject) -> None:
    raw = bytearray(encode(Op.LOOKUP, 0, 7, 9, Reserve("kv", 3), columns))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(BadMessage):
        message = decode(bytes(raw), len(raw))
        message.body(Lookup)
        message.column(0, "key")


@given(COLUMNS, st.data())
def test_half_messages_are_refused(columns: list[np.ndarray], data: st.DataObject) -> None:
    raw = encode(Op.COMMIT, 0, 7, 9, Reserve("kv", 3), columns)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(BadMessage):
        decode(raw[:cut], cut)


def test_a_message_over_the_limit_is_not_made() -> None:
    with pytest.raises(BadMessage, match="split it"):
        encode(Op.LOOKUP, 0, 1, 1, None, (np.zeros(MAX_MESSAGE, np.uint8),))


def test_errors_cross_the_wire_with_type_mend_and_holders() -> None:
    error = from_code("pool-full", "no room", "wait", (Holder(1, 2, "x", 3, 4),))
    assert type(error) is PoolFull
    assert error.holders[0].pid == 2
    assert str(error) == "no room; wait"
