"""Writing records: room in segments, I/O in runs, and the table that knows them only once they are on disk."""

import threading
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from omni_flow.data.ssd.batch import IoBatch
from omni_flow.data.ssd.config import Places
from omni_flow.data.ssd.core import Core
from omni_flow.data.ssd.format import BLOCK, ENTRY, Bytes, Kind, blocks_of
from omni_flow.data.ssd.io import Workers
from omni_flow.data.ssd.keeper import Keeper
from omni_flow.data.ssd.segments import RUN_RECORDS, Extent, Segment, State

Mask = npt.NDArray[np.bool_]
NO_PLACE = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class PutResult:
    """Item by item: whether the record is in the tier now, and its place (NO_PLACE if not).

    `busy[i]`: an I/O past its deadline may still read buffer i; changing it meanwhile spoils nothing, since
    the record was given up.
    """

    stored: Mask
    places: Places
    busy: Mask
    settled: threading.Event


class Writer:
    """The writing half of a tier."""

    def __init__(self, core: Core, workers: Workers, keeper: Keeper) -> None:
        self._core = core
        self._workers = workers
        self._keeper = keeper

    def write(self, kind: Kind, keys: Bytes, views: list[memoryview]) -> PutResult:
        """Stores checked payloads; see `SsdTier.put`."""
        core = self._core
        batch: IoBatch[list[int]] = IoBatch(self._workers, core.clock, core.config.io_deadline_s)
        raw = [key.tobytes() for key in keys]
        with core.lock:
            missing = core.table.find(keys) < 0
            # dict.fromkeys keeps the first of equal keys.
            first = {raw[i]: i for i in reversed(np.flatnonzero(missing).tolist())}
            todo = sorted(first.values())
            todo = todo[: core.table.room] if core.serving else []
            number = core.kind_number(kind)
        extents: list[tuple[Extent, list[int]]] = []
        at = 0
        lengths = [len(views[i]) for i in todo]
        while at < len(todo):
            extent = self._room_for(lengths[at : at + RUN_RECORDS], number)
            if extent is None:
                break
            items = todo[at : at + extent.count]
            extents.append((extent, items))
            job = partial(core.write_records, extent, kind, [raw[i] for i in items], [views[i] for i in items])
            batch.submit(job, partial(self._written, extent.segment))
            at += extent.count
        late = batch.wait(core.healthy)
        if late:
            core.io_stalled(f"{len(late)} writes")
        busy = np.zeros(len(views), np.bool_)
        written: list[tuple[Extent, list[int], list[int]]] = []
        for job_number, (extent, items) in enumerate(extents):
            outcome = batch.outcomes.get(job_number)
            if isinstance(outcome, OSError):
                core.io_failed("write", outcome)
            if isinstance(outcome, list):
                written.append((extent, items, outcome))
            else:
                busy[items] = job_number in late
                self._give_up(extent)
        if written:
            self._publish(written, number, keys, views)
        return self._put_result(keys, busy, batch.settled)

    def _room_for(self, lengths: list[int], number: int) -> Extent | None:
        """Takes room, waiting for the keeper where need be; None when there won't be any in time."""
        try:
            return self._wait_for_room(lengths, number)
        finally:
            self._core.tell_state()

    def _wait_for_room(self, lengths: list[int], number: int) -> Extent | None:
        core = self._core
        limit = core.clock() + core.config.io_deadline_s
        with core.lock:
            while core.serving:
                known = core.segments.starved
                before = (core.segments.open, core.segments.wants_spare())
                extent = core.segments.allocate(lengths, number)
                if extent is not None:
                    if before != (core.segments.open, core.segments.wants_spare()):
                        core.lock.notify_all()
                    return extent
                now = core.clock()
                busy = self._keeper.busy_since()
                if now >= limit:
                    if busy is not None and now - busy >= core.config.io_deadline_s:
                        core.counters.stalls += 1
                        core.breaker.stalled("making room", now)
                    return None
                if not known:
                    core.lock.notify_all()
                core.lock.wait(limit - now)
        return None

    def _written(self, segment: Segment) -> None:
        with self._core.lock:
            segment.writers -= 1
            self._wake_for(segment)

    def _wake_for(self, segment: Segment) -> None:
        """Wakes the keeper when a segment became ready to seal. Needs the lock."""
        if not segment.writers and segment.state is State.SEALING:
            self._core.lock.notify_all()

    def _give_up(self, extent: Extent) -> None:
        with self._core.lock:
            # The hole would end a walk by headers, so the segment gets its footer now.
            extent.segment.damaged = True
            extent.segment.writers -= 1
            self._core.lock.notify_all()

    def _publish(
        self, written: list[tuple[Extent, list[int], list[int]]], number: int, keys: Bytes, views: list[memoryview]
    ) -> None:
        core = self._core
        rows: list[tuple[int, int, int, int]] = []
        chosen: list[int] = []
        for extent, items, checksums in written:
            block = extent.block
            for i, checksum in zip(items, checksums, strict=True):
                rows.append((checksum, block, len(views[i]), extent.segment.slot))
                block += blocks_of(len(views[i]))
            chosen += items
        entries = np.zeros(len(rows), ENTRY)
        entries["key"] = keys[chosen]
        columns = zip(*rows, strict=True)
        entries["checksum"], entries["block"], entries["length"], slots = map(list, columns)
        taken = sum(blocks_of(row[2]) for row in rows) * BLOCK
        with core.lock:
            core.breaker.succeeded("write")
            # Another put of the same keys may have come first.
            new = np.flatnonzero(core.table.find(keys[chosen]) < 0)[: core.table.room]
            core.table.add(entries[new], np.array(slots, np.uint16)[new], np.full(len(new), number, np.uint16))
            core.counters.user_bytes += taken
            core.counters.stored += len(new)
            budget = core.move_budget + (core.config.write_amplification - 1) * taken
            core.move_budget = min(budget, float(core.segments.segment_bytes))
            for extent, _, _ in written:
                extent.segment.writers -= 1
                self._wake_for(extent.segment)

    def _put_result(self, keys: Bytes, busy: Mask, settled: threading.Event) -> PutResult:
        core = self._core
        with core.lock:
            rows = core.table.find(keys)
            stored = rows >= 0
            places = np.full(len(keys), NO_PLACE, np.uint64)
            places[stored] = core.places(core.table.slot[rows[stored]], core.table.block[rows[stored]])
            core.counters.refused += int(np.count_nonzero(~stored))
        return PutResult(stored, places, busy, settled)
