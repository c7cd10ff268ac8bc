"""The keeper: one thread that seals full segments, makes room for the next, and probes a sick disk."""

import errno
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from omni_flow.data.ssd.core import Core
from omni_flow.data.ssd.format import BLOCK, blocks_of, footer_blocks
from omni_flow.data.ssd.io import aligned_buffer
from omni_flow.data.ssd.opening import write_sealed
from omni_flow.data.ssd.segments import RUN_BYTES, RUN_RECORDS, Extent, Segment, State
from omni_flow.data.ssd.table import Rows, Spot

Blocks = npt.NDArray[np.uint32]


class Keeper:
    """Runs until `close`; every wait of it ends with a notification of the core's lock or with a probe's time."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._closing = False
        self._spare_failed = False
        self.busy_since: float | None = None
        self._thread = threading.Thread(target=self._loop, name="ssd-keeper", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Ends the thread once nothing is left to seal; returns False if it is still busy after `timeout` seconds."""
        with self._core.lock:
            self._closing = True
            self._core.lock.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def idle(self) -> bool:
        """Whether the tier is on and nothing is to be done. Needs the lock."""
        return self._core.breaker.closed and self.busy_since is None and self._next_step() is None

    def _loop(self) -> None:
        core = self._core
        while True:
            with core.lock:
                self.busy_since = None
                while (step := self._next_step()) is None:
                    core.lock.notify_all()
                    if self._closing:
                        return
                    core.lock.wait(core.breaker.until_probe(core.clock()))
                self.busy_since = core.clock()
                core.lock.notify_all()
            try:
                step()
            except OSError as error:
                core.io_failed("write", error)

    def _next_step(self) -> Callable[[], None] | None:
        core = self._core
        if (wait := core.breaker.until_probe(core.clock())) is not None and wait <= 0 and not self._closing:
            core.breaker.probing()
            return self._probe
        wanted = not self._closing and core.breaker.closed and core.segments.wants_spare()
        more = wanted and self._can_make_room()
        sealing = any(segment.state is State.SEALING for segment in core.segments.by_slot.values())
        core.segments.cornered = wanted and not more and not sealing
        if more and not core.segments.spares:
            # Writers wait for it; sealing, which waits for the disk, can come later.
            return self._make_spare
        for segment in core.segments.by_slot.values():
            if segment.state is State.SEALING and not segment.writers:
                return partial(self.seal, segment)
        return self._make_spare if more else None

    def _probe(self) -> None:
        core = self._core
        failure: OSError | None = None
        try:
            core.directory.probe()
        except OSError as error:
            failure = error
        with core.lock:
            core.breaker.probed(failure, core.clock())
        core.tell_state()

    def seal(self, segment: Segment) -> None:
        """Writes the footer and gives the file its final name. On OSError its records stay readable until a
        restart,
        which reads them by their headers."""
        core = self._core
        with core.lock:
            segment.state = State.SEALED
            rows = core.table.rows_in(segment.slot)
            entries = core.table.entries(rows)
            used, entries["kind"] = np.unique(entries["kind"], return_inverse=True)
            kinds = [core.kinds[number] for number in used.tolist()]
        start = segment.blocks - footer_blocks(len(entries), len(kinds))
        write_sealed(core, segment.fd, segment.ident, kinds, entries, start)
        core.io.fdatasync(segment.fd)
        path = core.directory.name(segment.ident, sealed=True)
        core.io.rename(segment.path, path)
        segment.path = path

    def _can_make_room(self) -> bool:
        segments = self._core.segments
        return (segments.fits_another() and not self._spare_failed) or self._victim() is not None

    def _victim(self) -> Segment | None:
        """The oldest full segment; one that a stalled read holds is passed over."""
        ready = [s for s in self._core.segments.by_slot.values() if s.state is State.SEALED]
        leaving = [s for s in self._core.segments.by_slot.values() if s.state is State.LEAVING and not s.readers]
        return min(leaving or ready, key=lambda segment: segment.ident, default=None)

    def _make_spare(self) -> None:
        core = self._core
        with core.lock:
            grow = core.segments.fits_another() and not self._spare_failed
            victim = None if grow else self._victim()
            if grow:
                core.segments.reserve()
        if grow:
            ident = core.directory.next_ident()
            try:
                fd, path = core.directory.create(ident, core.segments.segment_bytes)
            except OSError as error:
                with core.lock:
                    core.segments.reserve(-1)
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or self._victim() is None:
                        raise
                    # The disk is smaller than the cap: live with the segments there are.
                    self._spare_failed = True
                return
            with core.lock:
                blocks = core.segments.segment_bytes // BLOCK
                core.segments.add(ident, fd, path, blocks, State.SPARE, reserved=True)
        elif victim is not None:
            self._reclaim(victim)

    def _reclaim(self, segment: Segment) -> None:
        """Carries over what is in use, drops the rest, and makes the file the spare one (or deletes it)."""
        core = self._core
        if segment.state is State.SEALED:
            self._carry_over(segment)
            with core.lock:
                segment.state = State.LEAVING
                rows = core.table.rows_in(segment.slot)
                keys = core.table.keys[rows]
                places = core.drop(rows)
                core.counters.reclaimed_segments += 1
                core.counters.reclaimed_records += len(rows)
            if len(rows):
                core.config.on_change("dropped", keys, places, places)
        with core.lock:
            # Reads that began earlier must not see the file's next use. Waiting longer than an I/O may take
            # is in vain.
            core.lock.wait_for(lambda: not segment.readers, core.config.io_deadline_s)
            if segment.readers:
                return
        if segment.blocks * BLOCK != core.segments.segment_bytes:
            core.io.close(segment.fd)
            core.io.unlink(segment.path)
            with core.lock:
                core.segments.remove(segment)
                self._spare_failed = False
            return
        ident = core.directory.next_ident()
        path = core.directory.name(ident, sealed=False)
        # Not made durable: if a power cut brings the old name back, its footer names payloads that fail the checksum.
        core.io.rename(segment.path, path)
        with core.lock:
            core.segments.remove(segment)
            core.segments.add(ident, segment.fd, path, segment.blocks, State.SPARE)

    def _carry_over(self, segment: Segment) -> None:
        """Appends the records of a leaving segment that were read since they were written, most read first,
        within the
        budget that the write amplification leaves."""
        core = self._core
        with core.lock:
            rows = core.table.rows_in(segment.slot)
            rows = rows[core.table.hits[rows] > 0]
            rows = rows[np.argsort(-core.table.hits[rows].astype(np.int16), kind="stable")]
            sizes = np.cumsum([blocks_of(int(length)) * BLOCK for length in core.table.length[rows].tolist()])
            rows = rows[: int(np.searchsorted(sizes, core.move_budget, side="right"))] if len(rows) else rows
            rows = rows[np.argsort(core.table.block[rows])]
            spot, kinds, keys = core.table.spot(rows), core.table.kind[rows], core.table.keys[rows]
        at = 0
        while at < len(rows):
            end, payload = at, 0
            while (
                end < len(rows)
                and end - at < RUN_RECORDS
                and kinds[end] == kinds[at]
                and (end == at or payload + int(spot.length[end]) <= RUN_BYTES)
            ):
                payload += int(spot.length[end])
                end += 1
            part = slice(at, end)
            if not self._carry(segment, rows[part], spot[part], int(kinds[at]), [key.tobytes() for key in keys[part]]):
                return
            at = end

    def _carry(self, segment: Segment, rows: Rows, spot: Spot, kind: int, keys: list[bytes]) -> bool:
        """Carries one run over; False when there is no room for it."""
        core = self._core
        lengths = spot.length.tolist()
        buffer = aligned_buffer(sum((blocks_of(length) - 1) * BLOCK for length in lengths))
        payloads, start = [], 0
        for length in lengths:
            payloads.append(buffer[start : start + length])
            start += (blocks_of(length) - 1) * BLOCK
        good: list[int] = []
        for run in spot.runs(RUN_BYTES, RUN_RECORDS):
            sound = core.read_records(segment, spot[run], payloads[run])
            good += [run.start + i for i, ok in enumerate(sound) if ok]
        done = 0
        while done < len(good):
            with core.lock:
                extent = core.segments.allocate_carried([lengths[i] for i in good[done:]], kind)
            if extent is None:
                return False
            chosen = good[done : done + extent.count]
            done += extent.count
            try:
                core.write_records(extent, core.kinds[kind], [keys[i] for i in chosen], [payloads[i] for i in chosen])
            except OSError:
                with core.lock:
                    extent.segment.damaged = True
                    extent.segment.writers -= 2
                raise
            self._publish(extent, rows[chosen], spot.block[chosen], [lengths[i] for i in chosen], segment.slot)
        return True

    def _publish(self, extent: Extent, rows: Rows, old_blocks: Blocks, lengths: list[int], slot: int) -> None:
        core = self._core
        sizes = np.array([blocks_of(length) for length in lengths])
        blocks = (extent.block + np.cumsum(sizes) - sizes).astype(np.uint32)
        with core.lock:
            # A record that was dropped meanwhile is not brought back.
            same = (core.table.slot[rows] == slot) & (core.table.block[rows] == old_blocks)
            rows, blocks = rows[same], blocks[same]
            old = core.places(core.table.slot[rows], core.table.block[rows])
            core.table.move(rows, extent.segment.slot, blocks)
            new = core.places(core.table.slot[rows], core.table.block[rows])
            keys = core.table.keys[rows]
            extent.segment.writers -= 2
            written = int(sizes.sum()) * BLOCK
            core.move_budget -= written
            core.counters.moved_bytes += written
            core.counters.moved_records += len(rows)
            core.lock.notify_all()
        if len(rows):
            core.config.on_change("moved", keys, old, new)
