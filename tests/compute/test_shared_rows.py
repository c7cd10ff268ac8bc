"""The memory of fixed rows: two mappings of one place, places of their own, and nothing of it left."""

from __future__ import annotations

import asyncio
import os
import resource

import numpy as np
import pytest

from omni_flow.compute.errors import EngineFull, SessionClosed
from omni_flow.compute.sglang.fixed_client import FixedSession
from omni_flow.compute.sglang.shared_rows import RowsFile, SharedRows
from omni_flow.compute.sglang.wire import FixedOut, FixedStep, ToEngine


def resident(file: RowsFile) -> int:
    """Bytes of memory that the file takes."""
    return 512 * os.fstat(file.fd).st_blocks


def test_what_one_end_writes_the_other_reads_and_sessions_have_places_of_their_own() -> None:
    file = RowsFile()
    places = [file.place(rows, 7) for rows in (3, 2000, 1)]
    ours = [SharedRows(file.fd, at, rows, 7) for at, rows in zip(places, (3, 2000, 1), strict=True)]
    theirs = [SharedRows(file.fd, at, rows, 7) for at, rows in zip(places, (3, 2000, 1), strict=True)]
    assert resident(file) == 0
    for number, one in enumerate(ours):
        one.given[:], one.made[:] = number + 1, -number - 1
    for number, other in enumerate(theirs):
        assert (other.given == number + 1).all()
        assert (other.made == -number - 1).all()
        assert other.given.dtype == np.float32
    file.close()


def test_a_session_that_gives_back_leaves_nothing_and_the_others_theirs() -> None:
    file = RowsFile()
    one, two = (SharedRows(file.fd, file.place(1000, 64), 1000, 64) for _ in range(2))
    one.given[:], two.made[:] = 1, 2
    held = resident(file)
    one.give_back()
    assert 0 < resident(file) <= held // 2
    assert (two.made == 2).all()
    two.give_back()
    assert resident(file) == 0
    file.close()


def test_what_cannot_be_mapped_is_refused_in_words() -> None:
    closed = RowsFile()
    closed.close()
    with pytest.raises(EngineFull, match="5 rows of 7 can't be mapped"):
        SharedRows(closed.fd, 0, 5, 7)


def test_a_place_larger_than_a_file_may_be_is_refused_and_the_next_is_not_behind_it() -> None:
    file = RowsFile()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(EngineFull, match="have no place"):
            file.place(1000, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert file.place(5, 7) == 0
    file.close()


def test_a_step_that_was_answered_just_before_its_session_was_left_gives_no_rows_that_are_gone() -> None:
    async def run() -> None:
        file, sent = RowsFile(), list[ToEngine]()
        at = file.place(5, 7)
        ours, theirs = (SharedRows(file.fd, at, 5, 7) for _ in range(2))
        session = FixedSession(1, ours, sent.append, lambda: asyncio.sleep(0))
        step = asyncio.create_task(session.step(np.ones((5, 7), np.float32)))
        await asyncio.sleep(0)  # it runs until it waits for the answer
        assert sent == [FixedStep(1, b"")]
        theirs.made[:] = theirs.given
        session.answered(FixedOut(1))
        session.end(SessionClosed("left", ""))
        theirs.give_back()
        with pytest.raises(SessionClosed):
            await step
        file.close()

    asyncio.run(run())
