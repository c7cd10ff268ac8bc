"""The tcp driver on bad roads: broken, spoilt, stalled and hostile connections."""

import contextlib
import os
import resource
import signal
import socket
import struct
import threading
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_nodes import SIZE, SOURCE, TARGET, Proxy, spans

from omni_flow.data.transfer import wire
from omni_flow.data.transfer.chunks import MAX_PIECES, cut
from omni_flow.data.transfer.errors import (
    AuthRefused,
    BadJob,
    Cancelled,
    ChecksumMismatch,
    DeadlineExceeded,
    PeerRestarted,
    PeerUnreachable,
)
from omni_flow.data.transfer.host import DriverHost
from omni_flow.data.transfer.tcp_parts import TcpOptions

WHOLE = spans((0, 0, SIZE))
PROOF_BYTES, HELLO_BYTES = 68, 52 + 32
KEY = b"sixteen bytes or more"


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 50_000)), max_size=60),
    st.integers(4096, 1 << 20),
)
def test_chunks_cover_each_byte_once_in_order_and_keep_their_limits(rows, chunk_bytes):
    chunks = list(cut(spans(*rows), chunk_bytes))
    for chunk in chunks:
        assert 0 < chunk.nbytes <= chunk_bytes
        assert len(chunk.pieces) <= MAX_PIECES
        assert sum(n for _, _, n in chunk.pieces) == chunk.nbytes
    flat = iter([piece for chunk in chunks for piece in chunk.pieces])
    for local, remote, length in rows:
        while length:
            at, of, part = next(flat)
            assert (at, of) == (local, remote)
            local, remote, length = local + part, remote + part, length - part
    assert next(flat, None) is None


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_broken_connection_resumes_with_what_is_missing(tcp_nodes, direction):
    source, target = tcp_nodes
    passed = []

    def cut_first_two(number, seen, data):
        passed.append(len(data))
        limit = 2_000_000 if direction == "read" else 300
        return None if number < 2 and seen > limit else data

    if direction == "write":
        target.memory.bytes[:] = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
    with Proxy(source.host.endpoint(), cut_first_two) as proxy:
        id = target.host.submit(direction, proxy.endpoint, TARGET, SOURCE, WHOLE, 60.0)
        outcome = target.host.wait(id, 60)
        assert outcome.check() == SIZE
        assert outcome.retries > 0
        assert proxy.connections > 2
    if direction == "read":
        assert sum(passed) < SIZE * 1.5
    assert np.array_equal(target.memory.bytes, source.memory.bytes)


def test_a_flipped_bit_is_seen_and_the_chunk_asked_for_again(tcp_nodes):
    source, target = tcp_nodes
    flipped = []

    def flip_once(number, seen, data):
        if not flipped and seen > 300_000 and len(data) > 10_000:
            flipped.append(seen)
            return data[:5000] + bytes([data[5000] ^ 4]) + data[5001:]
        return data

    with Proxy(source.host.endpoint(), flip_once) as proxy:
        id = target.host.submit("read", proxy.endpoint, TARGET, SOURCE, WHOLE, 60.0)
        outcome = target.host.wait(id, 60)
        assert outcome.check() == SIZE
        assert outcome.retries >= 1
    assert flipped
    assert np.array_equal(target.memory.bytes, source.memory.bytes)


def test_a_road_that_always_spoils_ends_as_checksum_mismatch(tcp_nodes):
    source, target = tcp_nodes

    def spoil(number, seen, data):
        return data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 10_000 else data

    with Proxy(source.host.endpoint(), spoil) as proxy, pytest.raises((ChecksumMismatch, PeerUnreachable)):
        target.host.read(proxy.endpoint, TARGET, SOURCE, spans((0, 0, 64 << 10)))


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_stalled_peer_does_not_hold_a_cancelled_or_late_job(tcp_nodes, how):
    source, target = tcp_nodes
    target.host.read(source.host.endpoint(), TARGET, SOURCE, spans((0, 0, 64)))
    os.kill(source.host.pid, signal.SIGSTOP)
    timeout = 60.0 if how == "cancel" else 0.3
    id = target.host.submit("read", source.host.endpoint(), TARGET, SOURCE, WHOLE, timeout)
    if how == "cancel":
        assert target.host.progress(id).total == SIZE
        target.host.cancel(id)
    outcome = target.host.wait(id, 10)
    with pytest.raises(Cancelled if how == "cancel" else DeadlineExceeded, match=f"of {SIZE} bytes"):
        outcome.check()
    os.kill(source.host.pid, signal.SIGCONT)
    assert target.host.progress(id) is None
    assert target.host.read(source.host.endpoint(), TARGET, SOURCE, WHOLE) == SIZE


def test_after_a_cancel_has_been_reported_nothing_writes_the_local_arena(tcp_nodes):
    source, target = tcp_nodes
    under_way, go_on = threading.Event(), threading.Event()

    def hold(number, seen, data):
        if seen > 1_000_000:
            under_way.set()
            go_on.wait(30)
        return data

    with Proxy(source.host.endpoint(), hold) as proxy:
        id = target.host.submit("read", proxy.endpoint, TARGET, SOURCE, WHOLE, 60.0)
        assert under_way.wait(30)
        target.host.cancel(id)
        with pytest.raises(Cancelled):
            target.host.wait(id, 20).check()
        target.memory.bytes[:] = 0
        go_on.set()
        target.host.read(source.host.endpoint(), TARGET, SOURCE, spans((0, 0, 64)))
        assert not target.memory.bytes[64:].any()


def test_another_job_on_the_same_streams_survives_a_cancel(tcp_nodes):
    source, target = tcp_nodes
    half = SIZE // 2
    first = target.host.submit("read", source.host.endpoint(), TARGET, SOURCE, spans((0, 0, half)), 60.0)
    second = target.host.submit("read", source.host.endpoint(), TARGET, SOURCE, spans((half, half, half)), 60.0)
    target.host.cancel(first)
    assert target.host.wait(second, 30).check() == half
    target.host.wait(first, 30)
    assert np.array_equal(target.memory.bytes[half:], source.memory.bytes[half:])


def test_bytes_in_flight_are_bounded_over_all_streams(memories):
    chunk = 64 << 10
    options = TcpOptions(streams=4, depth=8, chunk_bytes=chunk, in_flight_bytes=2 * chunk)
    asked, answered, open_requests = Counter(), Counter(), []

    def watch(number, seen, data):
        asked[number] = max(0, seen + len(data) - PROOF_BYTES) // (wire.REQUEST.size + 16)
        open_requests.append(asked.total() - answered.total())

    def count(number, seen, data):
        answered[number] = max(0, seen + len(data) - HELLO_BYTES) // (wire.ANSWER.size + chunk)
        return data

    with DriverHost("tcp") as source, DriverHost("tcp", options) as target:
        source.register_arena(SOURCE, memories[0].fd, SIZE, "read")
        target.register_arena(TARGET, memories[1].fd, SIZE)
        with Proxy(source.endpoint(), count, watch) as proxy:
            assert target.read(proxy.endpoint, TARGET, SOURCE, WHOLE) == SIZE
    assert 1 <= max(open_requests) <= 2
    assert asked.total() == SIZE // chunk
    assert np.array_equal(memories[0].bytes, memories[1].bytes)


def test_a_restarted_peer_is_told_from_its_predecessor(memories):
    options = TcpOptions(key=KEY)
    with DriverHost("tcp", options) as target, DriverHost("tcp", options) as source:
        source.register_arena(SOURCE, memories[0].fd, SIZE, "read")
        target.register_arena(TARGET, memories[1].fd, SIZE)
        stale = source.endpoint()
        source.restart()
        stale = msgspec.structs.replace(stale, port=source.endpoint().port)
        with pytest.raises(PeerRestarted, match="ask its manager"):
            target.read(stale, TARGET, SOURCE, spans((0, 0, 64)))
        assert target.read(source.endpoint(), TARGET, SOURCE, spans((0, 0, 64))) == 64


def test_peers_with_the_shared_key_meet_and_one_with_another_is_refused(memories):
    with (
        DriverHost("tcp", TcpOptions(host="0.0.0.0", advertise="127.0.0.1", key=KEY)) as source,
        DriverHost("tcp", TcpOptions(key=KEY)) as friend,
        DriverHost("tcp", TcpOptions(key=b"another key of that length")) as stranger,
    ):
        source.register_arena(SOURCE, memories[0].fd, SIZE, "read")
        assert source.endpoint().secret == b""
        for host in (friend, stranger):
            host.register_arena(TARGET, memories[1].fd, SIZE)
        assert friend.read(source.endpoint(), TARGET, SOURCE, spans((0, 0, 64))) == 64
        with pytest.raises(AuthRefused, match="same transfer key"):
            stranger.read(source.endpoint(), TARGET, SOURCE, spans((0, 0, 64)))


def test_without_a_key_the_endpoint_alone_opens_the_driver(tcp_nodes):
    source, target = tcp_nodes
    guessed = msgspec.structs.replace(source.host.endpoint(), secret=b"guess" * 7)
    with pytest.raises(AuthRefused):
        target.host.read(guessed, TARGET, SOURCE, spans((0, 0, 64)))
    assert source.host.endpoint().secret.hex() not in repr(source.host.endpoint())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (TcpOptions(host="0.0.0.0"), "set a shared key"),
        (TcpOptions(key=b"short"), "fewer than 16"),
        (TcpOptions(chunk_bytes=1), "chunk_bytes"),
        (TcpOptions(in_flight_bytes=1), "in_flight_bytes"),
        (TcpOptions(streams=0), "at least 1"),
    ],
)
def test_settings_that_cannot_be_right_are_refused_by_name(options, text):
    with pytest.raises(BadJob, match=text):
        DriverHost("tcp", options)


def test_without_a_key_no_job_leaves_the_loopback(tcp_nodes):
    source, target = tcp_nodes
    outside = msgspec.structs.replace(source.host.endpoint(), host="192.0.2.1")
    with pytest.raises(AuthRefused, match="not on the loopback"):
        target.host.read(outside, TARGET, SOURCE, spans((0, 0, 64)))


def drain(sock, data):
    """Send, then read to the end; the driver may hang up at any point of it."""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=400))
def test_garbage_on_the_port_never_hurts(tcp_nodes, garbage):
    source, _ = tcp_nodes
    endpoint = source.host.endpoint()
    with socket.create_connection((endpoint.host, endpoint.port)) as sock:
        drain(sock, garbage)
    assert source.host.alive


def greeted(endpoint):
    sock = socket.create_connection((endpoint.host, endpoint.port))
    wire.greet_as_client(sock, endpoint.secret, endpoint.boot)
    return sock


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    op=st.integers(0, 255),
    pieces=st.integers(0, 0xFFFF),
    arena=st.integers(0, 3),
    nbytes=st.integers(0, 1 << 64 - 1) | st.integers(0, 100),
    body=st.binary(max_size=64),
)
def test_a_peer_that_lies_in_its_frames_ends_only_its_own_connection(tcp_nodes, op, pieces, arena, nbytes, body):
    source, target = tcp_nodes
    before = source.memory.bytes.copy()
    with greeted(source.host.endpoint()) as sock:
        drain(sock, wire.Request(op, pieces, arena, 1, nbytes & ((1 << 64) - 1), 0).pack() + body)
    assert target.host.read(source.host.endpoint(), TARGET, SOURCE, spans((0, 0, 64))) == 64
    if op != wire.WRITE:
        assert np.array_equal(source.memory.bytes, before)


def test_a_write_outside_the_arena_is_refused_and_the_connection_lives_on(tcp_nodes):
    source, _ = tcp_nodes
    with greeted(source.host.endpoint()) as sock:
        for offset in (SIZE - 1, 1 << 63, (1 << 64) - 1):
            head = wire.Request(wire.WRITE, 1, SOURCE, 5, 2, 0).pack()
            sock.sendall(head + struct.pack("<QQ", offset, 2) + b"xx")
            answer = bytearray(wire.ANSWER.size)
            wire.receive_exact(sock, [memoryview(answer)])
            reply = wire.Answer.unpack(answer)
            text = bytearray(reply.text_bytes)
            wire.receive_exact(sock, [memoryview(text)])
            assert text.startswith(b"out-of-bounds\n")


def test_a_driver_out_of_descriptors_serves_again_when_there_are_some(tcp_nodes):
    source, target = tcp_nodes
    endpoint = source.host.endpoint()
    target.host.read(endpoint, TARGET, SOURCE, spans((0, 0, 64)))
    before = resource.prlimit(source.host.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(source.host.pid, resource.RLIMIT_NOFILE, (4, before[1]))
    with socket.create_connection((endpoint.host, endpoint.port)) as sock:
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            wire.greet_as_client(sock, endpoint.secret, endpoint.boot)
        sock.settimeout(None)
        resource.prlimit(source.host.pid, resource.RLIMIT_NOFILE, before)
        wire.greet_as_client(sock, endpoint.secret, endpoint.boot)
    assert source.host.alive


def test_connections_are_kept_between_jobs(tcp_nodes):
    source, target = tcp_nodes
    with Proxy(source.host.endpoint(), lambda number, seen, data: data) as proxy:
        for _ in range(50):
            target.host.read(proxy.endpoint, TARGET, SOURCE, spans((0, 0, 4096)))
        assert proxy.connections == 1


def test_nothing_listens_on_a_port_that_no_driver_has(tcp_nodes):
    source, target = tcp_nodes
    gone = msgspec.structs.replace(source.host.endpoint(), port=1)
    with pytest.raises(PeerUnreachable):
        target.host.read(gone, TARGET, SOURCE, spans((0, 0, 64)), timeout_s=20)
