"""The frame of a mover process, and the mover between L1 and L2 of the CPU.

A mover is a client of the memory manager that executes its jobs. It may crash: the manager takes back what its jobs
held and its launcher starts it again. `python -m omni_flow.data.mover PATH` is the copy mover."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_flow.data.arena import Arena
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError, Disconnected, StaleEpoch, run_process
from omni_flow.data.messages import TIER_NAMES, Job, JobCancel, JobDone, L3Change, TierState
from omni_flow.data.protocol import MAX_BATCH, Column, Message, Op

log = logging.getLogger("omni_flow.data")
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
Columns = Sequence[NDArray[Any]]


class Handler(Protocol):
    """What a kind of mover does."""

    def start(self, link: MoverLink) -> None:
        """Called once, connected; recovery happens here."""

    def run(self, job: Job, columns: Columns) -> None:
        """Execute a job, here or in threads; ends with `link.done` from any thread.

        Args:
            columns: u32 row, u32 source slot, u32 target slot, u64 place in L3, key.
        """

    def cancel(self, job_id: int) -> None:
        """The job's time is over: end it soon, with `link.done` all the same."""


class MoverLink:
    """A mover's connection. `call`, `arena` belong to the main thread, the rest to any."""

    def __init__(self, client: MemoryManagerClient) -> None:
        self.client = client
        self._todo: deque[Callable[[], None]] = deque()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def arena(self, pool: str, tier: int) -> Arena:
        """Writable arena of a tier of a pool."""
        return self.client.arena(f"{pool}/{TIER_NAMES[tier]}", write=True)

    def pages(self, pool: str, tier: int) -> U8:
        """The slots of a tier as an array (slots, page bytes)."""
        info = next(info for info in self.client.welcome.pools if info.name == pool)
        count = info.l1_pages if tier == 1 else info.l2_pages
        return self.arena(pool, tier).pages(info.page_bytes, count)

    def call(self, op: int, body: msgspec.Struct | None = None, columns: Sequence[Column] = ()) -> Message:
        """A call to the manager."""
        return self.client.call(op, body, columns)

    def later(self, action: Callable[[], None]) -> None:
        """Run `action` in the main thread."""
        self._todo.append(action)
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_w, b"x")

    def done(self, job: Job, ok: U8 | Sequence[int], places: U64 | None = None, error: str = "") -> None:
        """A job has ended: per key 1 where it worked, and for `store` the places in L3."""
        flags = np.asarray(ok, np.uint8)
        columns: tuple[Column, ...] = (flags,)
        if job.kind == "store":
            columns = (flags, np.zeros(len(flags), np.uint64) if places is None else places)
        self.later(lambda: self._quietly(Op.JOB_DONE, JobDone(job.id, error), columns))

    def _quietly(self, op: int, body: msgspec.Struct, columns: Sequence[Column]) -> None:
        """A report the manager may refuse because it has forgotten the job; everything else is raised."""
        try:
            self.client.call(op, body, columns)
        except (StaleEpoch, Disconnected):
            raise
        except DataError as error:
            log.warning("report refused", extra={"op": op, "error": str(error)})

    def change_now(self, pool: str, what: str, keys: U8, old: U64, new: U64) -> None:
        """Tell what has changed in L3 (`recovered`, `moved`, `dropped`), in the main thread, in batches."""
        for at in range(0, len(keys), MAX_BATCH // 2):
            cut = slice(at, at + MAX_BATCH // 2)
            self.client.call(Op.L3_CHANGE, L3Change(pool, what), (keys[cut], old[cut], new[cut]))

    def change(self, pool: str, what: str, keys: U8, old: U64, new: U64) -> None:
        """The same from any thread."""
        self.later(lambda: self.change_now(pool, what, keys, old, new))

    def tier_state(self, pool: str, tier: int, on: bool, reason: str = "") -> None:
        """Switch a tier on or off, from any thread."""
        self.later(lambda: self._quietly(Op.TIER_STATE, TierState(pool, tier, on, reason), ()))

    def run_later(self) -> None:
        """Do what other threads have asked for."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        while self._todo:
            self._todo.popleft()()

    @property
    def wake_fd(self) -> int:
        return self._wake_r


def run_mover(address: str, name: str, kinds: Sequence[str], handler: Handler) -> None:
    """Execute jobs until the manager ends or is started again. Returns then; errors of the handler end the process."""
    client = MemoryManagerClient(address, name=name, role="mover", kinds=tuple(kinds))
    link = MoverLink(client)
    events: deque[Message] = deque()
    client.on_event = lambda message: events.append(message.own())
    poll = select.poll()
    poll.register(client.link.fileno(), select.POLLIN)
    poll.register(link.wake_fd, select.POLLIN)
    try:
        handler.start(link)
        while True:
            while events:
                message = events.popleft()
                if message.op == Op.JOB:
                    handler.run(message.body(Job), message.columns)
                elif message.op == Op.JOB_CANCEL:
                    handler.cancel(message.body(JobCancel).id)
                link.run_later()
            link.run_later()
            if events:
                continue
            poll.poll()
            client.take_events()
    except (Disconnected, StaleEpoch):
        return
    finally:
        client.close()


class CopyHandler:
    """Copies pages between the arenas of L1 and L2 in CPU memory."""

    def start(self, link: MoverLink) -> None:
        self._link = link

    def run(self, job: Job, columns: Columns) -> None:
        source = self._link.pages(job.pool, job.src)
        target = self._link.pages(job.pool, job.dst)
        for src, dst in zip(columns[1].tolist(), columns[2].tolist(), strict=True):
            target[dst] = source[src]
        self._link.done(job, np.ones(len(columns[1]), np.uint8))

    def cancel(self, job_id: int) -> None:
        """Jobs are run one by one: a job that has begun ends by itself."""


def main(argv: Sequence[str]) -> None:
    """The copy mover; the path of the manager's socket is its argument."""
    run_mover(argv[1], "copy mover", ("copy",), CopyHandler())


if __name__ == "__main__":
    run_process(lambda: main(sys.argv))
