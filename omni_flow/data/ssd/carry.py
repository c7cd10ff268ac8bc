"""What reclaim carries over: records of a leaving segment that were read since they were written."""

from functools import partial

import numpy as np

from omni_flow.data.ssd.batch import IoBatch
from omni_flow.data.ssd.core import Core
from omni_flow.data.ssd.format import BLOCK, blocks_of
from omni_flow.data.ssd.io import Workers, aligned_buffer
from omni_flow.data.ssd.segments import RUN_BYTES, RUN_RECORDS, Extent, Segment
from omni_flow.data.ssd.table import Rows, Spot

CARRY_BYTES = 8 << 20
THREADS = 2


class Carrier:
    """Appends records anew in the last spare segment, a few MiB at a time, on threads of its own.

    Not thread-safe; its keeper is the only caller.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._workers = Workers(THREADS, "ssd-carry")
        # Kept, because fresh memory costs more in page faults than the copy through it.
        self._buffer = aligned_buffer(0)

    def stop(self, timeout: float) -> bool:
        """Ends the threads; returns False if one is still busy after `timeout` seconds."""
        return self._workers.stop(timeout)

    def carry_over(self, segment: Segment) -> None:
        """Carries over what is in use, most read first, within the budget that the write amplification leaves and the
        room there is. Stops at the first sign of a sick disk."""
        core = self._core
        with core.lock:
            rows = core.table.rows_in(segment.slot)
            rows = rows[core.table.hits[rows] > 0]
            rows = rows[np.argsort(-core.table.hits[rows].astype(np.int16), kind="stable")]
            sizes = np.cumsum(
                [blocks_of(length) * BLOCK for length in core.table.length[rows].tolist()], dtype=np.int64
            )
            rows = rows[: int(np.searchsorted(sizes, core.move_budget, side="right"))]
            rows = rows[np.argsort(core.table.block[rows])]
            spot, kinds = core.table.spot(rows), core.table.kind[rows].tolist()
            keys = [key.tobytes() for key in core.table.keys[rows]]
        lengths = spot.length.tolist()
        start = 0
        while start < len(rows):
            end, payload = start + 1, lengths[start]
            while end < len(rows) and kinds[end] == kinds[start] and payload + lengths[end] <= CARRY_BYTES:
                payload += lengths[end]
                end += 1
            part = slice(start, end)
            if not self._carry(segment, rows[part], spot[part], kinds[start], keys[part]):
                return
            start = end

    def _carry(self, segment: Segment, rows: Rows, spot: Spot, kind: int, keys: list[bytes]) -> bool:
        payloads = self._payloads(spot.length.tolist())
        good = self._read(segment, spot, payloads)
        if good is None:
            return False
        chosen = [(rows[i], spot.block[i], keys[i], payloads[i]) for i in good]
        return self._write(segment, kind, chosen)

    def _payloads(self, lengths: list[int]) -> list[memoryview]:
        padded = [(blocks_of(length) - 1) * BLOCK for length in lengths]
        if len(self._buffer) < sum(padded):
            self._buffer = aligned_buffer(sum(padded))
        starts = np.cumsum(padded) - padded
        return [self._buffer[at : at + length] for at, length in zip(starts.tolist(), lengths, strict=True)]

    def _read(self, segment: Segment, spot: Spot, payloads: list[memoryview]) -> list[int] | None:
        """Returns which records are sound, None when the disk is not."""
        core = self._core
        batch: IoBatch[list[bool]] = IoBatch(self._workers, core.clock, core.config.io_deadline_s)
        runs = spot.runs(RUN_BYTES, RUN_RECORDS)
        for run in runs:
            with core.lock:
                segment.readers += 1
            batch.submit(partial(core.read_records, segment, spot[run], payloads[run]), partial(self._unread, segment))
        if not self._settle(batch, "reads to carry over"):
            return None
        good: list[int] = []
        for number, run in enumerate(runs):
            outcome = batch.outcomes.get(number)
            if isinstance(outcome, list):
                good += [run.start + i for i, sound in enumerate(outcome) if sound]
            elif outcome is not None:
                core.io_failed("read", outcome)
        return good

    def _unread(self, segment: Segment) -> None:
        with self._core.lock:
            segment.readers -= 1
            self._core.lock.notify_all()

    def _write(self, segment: Segment, kind: int, chosen: list[tuple[np.int64, np.uint32, bytes, memoryview]]) -> bool:
        core = self._core
        batch: IoBatch[list[int]] = IoBatch(self._workers, core.clock, core.config.io_deadline_s)
        extents: list[tuple[Extent, list[tuple[np.int64, np.uint32, bytes, memoryview]]]] = []
        done, room = 0, True
        while done < len(chosen) and room:
            with core.lock:
                lengths = [len(item[3]) for item in chosen[done : done + RUN_RECORDS]]
                extent = core.segments.allocate_carried(lengths, kind)
            if extent is None:
                room = False
                continue
            items = chosen[done : done + extent.count]
            done += extent.count
            extents.append((extent, items))
            job = partial(core.write_records, extent, core.kinds[kind], [i[2] for i in items], [i[3] for i in items])
            batch.submit(job, partial(self._unwrite, extent.segment))
        sound = self._settle(batch, "writes to carry over")
        for number, (extent, items) in enumerate(extents):
            outcome = batch.outcomes.get(number)
            if isinstance(outcome, list):
                self._publish(extent, items, segment.slot)
                continue
            with core.lock:
                extent.segment.damaged = True
            self._unwrite(extent.segment)
            sound = False
            if outcome is not None:
                core.io_failed("write", outcome)
        return sound and room

    def _unwrite(self, segment: Segment) -> None:
        with self._core.lock:
            segment.writers -= 1
            self._core.lock.notify_all()

    def _settle(self, batch: IoBatch[list[int]] | IoBatch[list[bool]], what: str) -> bool:
        """Waits; returns False after a stall, whose I/O keeps the buffer."""
        if late := batch.wait(lambda: self._core.breaker.closed):
            self._buffer = aligned_buffer(0)
            self._core.io_stalled(f"{len(late)} {what}")
        return not late

    def _publish(self, extent: Extent, items: list[tuple[np.int64, np.uint32, bytes, memoryview]], slot: int) -> None:
        core = self._core
        sizes = np.array([blocks_of(len(item[3])) for item in items])
        blocks = (extent.block + np.cumsum(sizes) - sizes).astype(np.uint32)
        rows = np.array([item[0] for item in items], np.int64)
        old_blocks = np.array([item[1] for item in items], np.uint32)
        with core.lock:
            # A record that was dropped meanwhile is not brought back.
            same = (core.table.slot[rows] == slot) & (core.table.block[rows] == old_blocks)
            rows, blocks = rows[same], blocks[same]
            old = core.places(core.table.slot[rows], core.table.block[rows])
            core.table.move(rows, extent.segment.slot, blocks)
            new = core.places(core.table.slot[rows], core.table.block[rows])
            keys = core.table.keys[rows]
            written = int(sizes.sum()) * BLOCK
            core.move_budget -= written
            core.counters.moved_bytes += written
            core.counters.moved_records += len(rows)
        self._unwrite(extent.segment)
        if len(rows):
            core.config.on_change("moved", keys, old, new)
