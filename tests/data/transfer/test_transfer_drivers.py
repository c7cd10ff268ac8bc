"""What every transfer driver does, on each driver that is installed here."""

import itertools
import os
import signal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_nodes import SIZE, SOURCE, TARGET, Memory, spans

from omni_flow.data.transfer.errors import (
    AccessDenied,
    BadJob,
    DriverAbsent,
    DriverDied,
    OutOfBounds,
    TransferError,
    UnknownArena,
)
from omni_flow.data.transfer.host import DriverHost
from omni_flow.data.transfer.registry import absent_drivers, available_drivers


def test_every_driver_is_either_here_or_absent_with_the_way_to_have_it(record_property, capsys):
    absent = absent_drivers()
    assert "tcp" in available_drivers()
    assert not set(available_drivers()) & set(absent)
    for name, reason in absent.items():
        record_property(f"absent_transfer_driver_{name}", reason)
        with capsys.disabled():
            print(f"\ntransfer driver {name} is absent, its tests did not run: {reason}")
        with pytest.raises(DriverAbsent, match=f"omni-flow\\[{name}\\]"):
            DriverHost(name)


def test_an_unknown_driver_is_named():
    with pytest.raises(DriverAbsent, match="'carrier-pigeon'"):
        DriverHost("carrier-pigeon")


def test_a_read_fills_exactly_the_local_spans(nodes):
    source, target = nodes
    rows = spans((0, 100, 5000), (1 << 20, 3 << 20, 2 << 20), (7 << 20, 1, 1))
    moved = target.host.read(source.host.endpoint(), TARGET, SOURCE, rows)
    assert moved == 5000 + (2 << 20) + 1
    expected = np.zeros(SIZE, np.uint8)
    for local, remote, length in rows.tolist():
        expected[local : local + length] = source.memory.bytes[remote : remote + length]
    assert np.array_equal(target.memory.bytes, expected)


def test_a_write_fills_exactly_the_remote_spans(nodes):
    source, target = nodes
    before = source.memory.bytes.copy()
    target.memory.bytes[: 3 << 20] = 7
    rows = spans((0, 5 << 20, 3 << 20), (10, 0, 4097))
    assert target.host.write(source.host.endpoint(), TARGET, SOURCE, rows) == (3 << 20) + 4097
    before[5 << 20 : 8 << 20] = 7
    before[:4097] = 7
    assert np.array_equal(source.memory.bytes, before)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_list_of_disjoint_spans_moves_right(nodes, data):
    source, target = nodes
    cuts = sorted(data.draw(st.sets(st.integers(0, SIZE), min_size=2, max_size=40)))
    places = list(itertools.pairwise(cuts))[::2]
    rows = [(a, data.draw(st.integers(0, SIZE - (b - a))), b - a) for a, b in places]
    target.memory.bytes[:] = 0
    target.host.read(source.host.endpoint(), TARGET, SOURCE, spans(*rows))
    expected = np.zeros(SIZE, np.uint8)
    for local, remote, length in rows:
        expected[local : local + length] = source.memory.bytes[remote : remote + length]
    assert np.array_equal(target.memory.bytes, expected)


def test_thousands_of_small_spans_move_in_one_job(nodes):
    source, target = nodes
    number = np.arange(5000, dtype=np.uint64)
    rows = np.stack([number * 1000, (4999 - number) * 1500, np.full(5000, 700, np.uint64)], axis=1)
    target.host.read(source.host.endpoint(), TARGET, SOURCE, rows)
    for at in (0, 1, 2500, 4999):
        local, remote, length = (int(x) for x in rows[at])
        assert np.array_equal(
            target.memory.bytes[local : local + length], source.memory.bytes[remote : remote + length]
        )


def test_jobs_run_side_by_side_and_each_ends_once(nodes):
    source, target = nodes
    ids = [
        target.host.submit("read", source.host.endpoint(), TARGET, SOURCE, spans((n << 18, n << 18, 1 << 18)), 30.0)
        for n in range(32)
    ]
    outcomes = [target.host.wait(id, 60) for id in ids]
    assert [outcome.check() for outcome in outcomes] == [1 << 18] * 32
    assert target.host.events() == []
    assert np.array_equal(target.memory.bytes, source.memory.bytes)


@pytest.mark.parametrize(
    ("rows", "local", "remote", "error"),
    [
        (((SIZE - 1, 0, 2),), TARGET, SOURCE, OutOfBounds),
        (((0, SIZE - 1, 2),), TARGET, SOURCE, OutOfBounds),
        (((0, (1 << 61), 2),), TARGET, SOURCE, OutOfBounds),
        (((0, 0, 0),), TARGET, SOURCE, BadJob),
        ((), TARGET, SOURCE, BadJob),
        (((0, 0, 1),), 9, SOURCE, UnknownArena),
        (((0, 0, 1),), TARGET, 9, UnknownArena),
    ],
)
def test_a_wrong_job_ends_with_a_typed_error_and_moves_nothing(nodes, rows, local, remote, error):
    source, target = nodes
    with pytest.raises(error):
        target.host.read(source.host.endpoint(), local, remote, spans(*rows))
    assert not target.memory.bytes.any()
    assert target.host.read(source.host.endpoint(), TARGET, SOURCE, spans((0, 0, 64))) == 64


def test_a_peer_that_opened_nothing_is_not_read(nodes):
    source, target = nodes
    with pytest.raises(AccessDenied):
        source.host.read(target.host.endpoint(), SOURCE, TARGET, spans((0, 0, 64)))


def kill(pid):
    """Kill a child and wait until it is dead; its host still collects it."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_dead_peer_gives_a_typed_error_and_the_next_job_works(mortal_nodes):
    source, target = mortal_nodes
    endpoint = source.host.endpoint()
    target.host.read(endpoint, TARGET, SOURCE, spans((0, 0, 64)))
    kill(source.host.pid)
    with pytest.raises(TransferError):
        target.host.read(endpoint, TARGET, SOURCE, spans((0, 0, 64)), timeout_s=20)
    source.host.restart()
    assert target.host.alive
    assert target.host.read(source.host.endpoint(), TARGET, SOURCE, spans((0, 0, 64))) == 64


def test_the_death_of_the_own_driver_ends_its_jobs_and_a_restart_serves_again(mortal_nodes):
    source, target = mortal_nodes
    os.kill(source.host.pid, signal.SIGSTOP)
    id = target.host.submit("read", source.host.endpoint(), TARGET, SOURCE, spans((0, 0, SIZE)), 60.0)
    kill(target.host.pid)
    with pytest.raises(DriverDied, match="restart"):
        target.host.wait(id, 20).check()
    os.kill(source.host.pid, signal.SIGCONT)
    target.host.restart()
    assert target.host.read(source.host.endpoint(), TARGET, SOURCE, spans((0, 0, SIZE))) == SIZE
    assert np.array_equal(target.memory.bytes, source.memory.bytes)


def test_the_driver_process_ends_with_its_host(driver):
    host = DriverHost(driver)
    handle = os.pidfd_open(host.pid)
    host._channel.sock.close()
    assert os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT).si_status == 0
    os.close(handle)
    host.close()


def test_an_arena_number_is_given_once_and_the_file_must_be_long_enough(nodes):
    source, _ = nodes
    small = Memory(4096)
    with pytest.raises(BadJob, match="registered already"):
        source.host.register_arena(SOURCE, small.fd, 4096)
    with pytest.raises(BadJob, match="its file has 4096"):
        source.host.register_arena(7, small.fd, 8192)
    small.close()
