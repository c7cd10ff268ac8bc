"""The packet joiner, fuzzed: what was cut is joined, and no input at all does worse than a ProtocolError."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_flow.control.transport.base import MESSAGE_LIMIT, PROTOCOL_VERSION
from omni_flow.control.transport.errors import ProtocolError
from omni_flow.control.transport.packets import CUT, HELLO, PACKET_BYTES, WHOLE, Joiner, cut, hello, read_hello

SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(PACKET_BYTES - 8, PACKET_BYTES + 8),
    st.integers(2 * PACKET_BYTES - 8, 2 * PACKET_BYTES + 8),
    st.integers(0, 5 * PACKET_BYTES),
)


def feed(joiner: Joiner, packet: bytes | memoryview) -> bytes | memoryview | None:
    """As a socket does: as much as fits into the target, and the real length."""
    held = min(len(packet), len(joiner.target))
    joiner.target[:held] = packet[:held]
    return joiner.take(len(packet))


def joiner() -> Joiner:
    return Joiner(memoryview(bytearray(PACKET_BYTES)))


@given(st.lists(SIZES, max_size=6))
@settings(max_examples=60, deadline=None)
def test_messages_of_any_sizes_come_out_as_they_went_in(sizes: list[int]) -> None:
    messages = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    one = joiner()
    packets = [packet for message in messages for packet in cut(message)]
    assert all(0 < len(packet) <= PACKET_BYTES for packet in packets)
    joined = [out for packet in packets if (out := feed(one, packet)) is not None]
    assert [bytes(out) for out in joined] == messages
    assert one.idle


@given(st.lists(SIZES, min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_what_was_joined_does_not_change_when_the_next_packet_comes(sizes: list[int]) -> None:
    one = joiner()
    held = []
    for n, size in enumerate(sizes):
        for packet in cut(bytes([n + 1]) * size):
            out = feed(one, packet)
            if out is not None:
                held.append((n, size, out))
    assert all(bytes(out) == bytes([n + 1]) * size for n, size, out in held)


@given(
    st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=40),
            st.builds(
                lambda total, rest: CUT + total.to_bytes(4, "little") + rest,
                st.integers(0, 200),
                st.binary(max_size=60),
            ),
            st.builds(lambda rest: WHOLE + rest, st.binary(max_size=40)),
            st.integers(PACKET_BYTES, PACKET_BYTES + 2).map(lambda size: WHOLE + bytes(size)),
        ),
        max_size=12,
    )
)
@settings(max_examples=300, deadline=None)
def test_any_packets_give_messages_within_the_limit_or_a_protocol_error(packets: list[bytes]) -> None:
    one = joiner()
    for packet in packets:
        try:
            out = feed(one, packet)
        except ProtocolError:
            return
        assert out is None or len(out) <= MESSAGE_LIMIT
        assert len(one.target) > 0


@pytest.mark.parametrize(
    ("packet", "what"),
    [
        (CUT + (MESSAGE_LIMIT + 1).to_bytes(4, "little") + b"x", "limit"),
        (CUT + (3).to_bytes(4, "little") + b"abc", "announced as cut"),
        (CUT + b"\1\0", "where a batch begins"),
        (HELLO + b"again", "where a batch begins"),
        (WHOLE + bytes(PACKET_BYTES), "at most"),
    ],
)
def test_a_malformed_packet_is_named(packet: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        feed(joiner(), packet)


def test_a_packet_longer_than_what_is_missing_is_refused() -> None:
    one = joiner()
    feed(one, CUT + (10).to_bytes(4, "little") + b"12345678")
    with pytest.raises(ProtocolError, match="at most 2 fit"):
        feed(one, b"9abc")


@given(st.text(min_size=1).filter(lambda text: text.isprintable()))
def test_a_hello_carries_its_address(address: str) -> None:
    assert read_hello(hello(address)) == address


@given(st.binary(max_size=60))
def test_any_other_first_packet_is_refused(packet: bytes) -> None:
    with pytest.raises(ProtocolError, match="no hello"):
        read_hello(packet)


def test_another_protocol_version_is_named() -> None:
    packet = bytearray(hello("unix:///x/y"))
    packet[len(b"\1omniflow")] = PROTOCOL_VERSION + 1
    with pytest.raises(ProtocolError, match=f"version {PROTOCOL_VERSION + 1} of the peer, {PROTOCOL_VERSION} here"):
        read_hello(packet)


def test_a_hello_that_is_no_text_is_refused() -> None:
    with pytest.raises(ProtocolError, match="UTF-8"):
        read_hello(hello("a") + b"\xff\xfe")
