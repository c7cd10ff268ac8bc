"""The breaker: when a disk counts as sick, and how it gets another chance."""

import errno

import pytest

from omni_flow.data.ssd.breaker import Breaker, Health

EIO = OSError(errno.EIO, "I/O error")


def test_errors_in_a_row_open_it_and_a_success_starts_the_count_again() -> None:
    breaker = Breaker(errors_to_open=3)
    for _ in range(2):
        breaker.failed("read", EIO, 0)
    breaker.succeeded("read")
    for _ in range(2):
        breaker.failed("read", EIO, 0)
    assert breaker.closed
    breaker.failed("read", EIO, 0)
    assert breaker.health is Health.OPEN
    assert "EIO" in breaker.reason


def test_good_writes_do_not_excuse_failing_reads() -> None:
    breaker = Breaker(errors_to_open=2)
    for _ in range(2):
        breaker.failed("read", EIO, 0)
        breaker.succeeded("write")
    assert not breaker.closed


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_or_read_only_disk_opens_it_at_once(number: int) -> None:
    breaker = Breaker()
    breaker.failed("write", OSError(number, "full"), 0)
    assert not breaker.closed


def test_one_stall_opens_it() -> None:
    breaker = Breaker()
    breaker.stalled("2 reads", 5)
    assert breaker.reason == "stalled: 2 reads"
    assert not breaker.closed


def test_probes_come_after_a_wait_that_doubles_up_to_a_bound() -> None:
    breaker = Breaker(first_wait_s=1, max_wait_s=4)
    breaker.stalled("x", 10)
    waits, now = [], 10.0
    for _ in range(4):
        wait = breaker.until_probe(now)
        assert wait is not None
        waits.append(wait)
        now += wait
        breaker.probing()
        assert breaker.until_probe(now) is None
        breaker.probed(EIO, now)
    assert waits == [1, 2, 4, 4]


def test_a_good_probe_closes_it_and_forgets_the_past() -> None:
    breaker = Breaker(errors_to_open=2, first_wait_s=1)
    breaker.stalled("x", 0)
    breaker.probing()
    breaker.probed(EIO, 1)
    breaker.probing()
    breaker.probed(None, 3)
    assert breaker.closed
    assert breaker.until_probe(3) is None
    breaker.failed("read", EIO, 4)
    assert breaker.closed
    breaker.failed("read", EIO, 4)
    assert breaker.until_probe(4) == 1
    assert breaker.opened == 2
