"""The keeper: seals full segments, makes room for the next, and probes a sick disk, all behind the writers' backs."""

import errno
import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from omni_flow.data.ssd.carry import Carrier
from omni_flow.data.ssd.core import Core
from omni_flow.data.ssd.format import BLOCK, footer_blocks
from omni_flow.data.ssd.opening import write_sealed
from omni_flow.data.ssd.segments import Segment, State

Step = Callable[[], None]
GROWTH_PAUSE_S = 60.0
"""How long a disk that was full is left alone before another segment is tried."""


class Keeper:
    """Two threads: one seals, which waits for the disk's own cache, the other makes room, which writers wait for.

    Every wait ends with a notification of the core's lock or with a probe's time.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._carrier = Carrier(core)
        self._closing = False
        self._grow_after = core.clock()
        self._busy: dict[str, float] = {}
        roles = {"seal": self._next_seal, "room": self._next_room}
        self._threads = [
            threading.Thread(target=self._loop, args=(role, step), name=f"ssd-{role}", daemon=True)
            for role, step in roles.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self, timeout: float) -> bool:
        """Ends the threads once nothing is left to seal; returns False if one is still busy after `timeout` seconds."""
        with self._core.lock:
            self._closing = True
            self._core.lock.notify_all()
        for thread in self._threads:
            thread.join(timeout)
        return self._carrier.stop(timeout) and not any(thread.is_alive() for thread in self._threads)

    def idle(self) -> bool:
        """Whether the tier is on and nothing is to be done. Needs the lock."""
        todo = not self._core.breaker.closed or self._busy or self._next_seal() or self._next_room()
        return not todo

    def busy_since(self) -> float | None:
        """When the oldest step that is running began. Needs the lock."""
        return min(self._busy.values(), default=None)

    def _loop(self, role: str, next_step: Callable[[], Step | None]) -> None:
        core = self._core
        while True:
            with core.lock:
                while (step := next_step()) is None:
                    if self._closing:
                        return
                    core.lock.wait(core.breaker.until_probe(core.clock()) if role == "room" else None)
                self._busy[role] = core.clock()
            try:
                step()
            except OSError as error:
                core.io_failed("write", error)
            with core.lock:
                del self._busy[role]
                core.lock.notify_all()

    def _next_seal(self) -> Step | None:
        for segment in self._core.segments.by_slot.values():
            if segment.state is State.SEALING and not segment.writers:
                return partial(self._seal, segment)
        return None

    def _next_room(self) -> Step | None:
        core = self._core
        if self._closing:
            return None
        if (wait := core.breaker.until_probe(core.clock())) is not None and wait <= 0:
            core.breaker.probing()
            return self._probe
        wanted = core.breaker.closed and core.segments.wants_spare()
        possible = wanted and self._can_make_room()
        sealing = any(segment.state is State.SEALING for segment in core.segments.by_slot.values())
        core.segments.cornered = wanted and not possible and not sealing
        return self._make_spare if possible else None

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

    def _seal(self, segment: Segment) -> None:
        """Writes the footer and gives the file its final name. On OSError the records stay readable, and a restart
        finds them by their headers."""
        core = self._core
        try:
            with core.lock:
                entries = core.table.entries(core.table.rows_in(segment.slot))
                used, entries["kind"] = np.unique(entries["kind"], return_inverse=True)
                kinds = [core.kinds[number] for number in used.tolist()]
            start = segment.blocks - footer_blocks(len(entries), len(kinds))
            write_sealed(core, segment.fd, segment.ident, kinds, entries, start)
            core.io.fdatasync(segment.fd)
            path = core.directory.name(segment.ident, sealed=True)
            core.io.rename(segment.path, path)
            segment.path = path
        finally:
            # Only now may reclaim have the file.
            with core.lock:
                segment.state = State.SEALED

    def _may_grow(self) -> bool:
        return self._core.segments.fits_another() and self._core.clock() >= self._grow_after

    def _can_make_room(self) -> bool:
        return self._may_grow() or self._victim() is not None

    def _victim(self) -> Segment | None:
        """The oldest full segment; one that a stalled read holds is passed over."""
        ready = [s for s in self._core.segments.by_slot.values() if s.state is State.SEALED]
        leaving = [s for s in self._core.segments.by_slot.values() if s.state is State.LEAVING and not s.readers]
        return min(leaving or ready, key=lambda segment: segment.ident, default=None)

    def _make_spare(self) -> None:
        core = self._core
        with core.lock:
            grow = self._may_grow()
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
                    others = [s for s in core.segments.by_slot.values() if s.state is not State.OPEN]
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or not others:
                        raise
                    # The disk is smaller than the cap: live with the segments there are, or will be once sealed.
                    self._grow_after = core.clock() + GROWTH_PAUSE_S
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
            self._carrier.carry_over(segment)
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
            # Reads that began earlier must not see the file's next use. Waiting longer than an I/O may take is in vain.
            core.lock.wait_for(lambda: not segment.readers, core.config.io_deadline_s)
            if segment.readers:
                return
        if segment.blocks * BLOCK != core.segments.segment_bytes:
            core.io.close(segment.fd)
            core.io.unlink(segment.path)
            with core.lock:
                core.segments.remove(segment)
                self._grow_after = core.clock()
            return
        ident = core.directory.next_ident()
        path = core.directory.name(ident, sealed=False)
        # Not made durable: if a power cut brings the old name back, its footer names payloads that fail the checksum.
        core.io.rename(segment.path, path)
        with core.lock:
            core.segments.remove(segment)
            core.segments.add(ident, segment.fd, path, segment.blocks, State.SPARE)
