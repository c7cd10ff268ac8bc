"""The SSD tier: a bounded, checksummed, crash-safe store of immutable records in one directory."""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from omni_flow.data.ssd.batch import IoBatch
from omni_flow.data.ssd.config import Places, SsdConfig, SsdStats
from omni_flow.data.ssd.core import Core
from omni_flow.data.ssd.errors import BufferMismatch
from omni_flow.data.ssd.format import KEY_BYTES, Bytes, Kind
from omni_flow.data.ssd.io import Io, OsIo, Workers
from omni_flow.data.ssd.keeper import Keeper
from omni_flow.data.ssd.opening import recover
from omni_flow.data.ssd.segments import RUN_BYTES, RUN_RECORDS, Segment, State
from omni_flow.data.ssd.table import Spot
from omni_flow.data.ssd.writer import PutResult, Writer

Buffer: TypeAlias = memoryview | bytearray | bytes | npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GetResult:
    """Item by item: the payload's length, -1 for a miss.

    `busy[i]`: an I/O past its deadline may still write into buffer i, which counts as a miss and must not be
    used for anything until `settled` is set.
    """

    lengths: npt.NDArray[np.int64]
    busy: Mask
    settled: threading.Event


class SsdTier:
    """Open one with `SsdTier.open`. Thread-safe; every call takes a batch.

    Records are immutable: a key names its bytes, so putting a key that is there does nothing. A full tier
    drops its oldest segment, except for records read since they were written, which are appended anew as far
    as the write amplification allows. What is lost (a crash, a bad sector, reclaim) is a miss and never wrong
    bytes: every payload is checked against its checksum when it is read. No call waits longer than the
    deadline for one I/O; on a stall, a full disk or repeated errors the tier turns itself off, answers at
    once (misses, nothing stored), probes the disk and comes back.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._workers = Workers(core.config.threads, "ssd-io")
        self._keeper = Keeper(core)
        self._writer = Writer(core, self._workers, self._keeper)

    @classmethod
    def open(cls, config: SsdConfig, io: Io | None = None, clock: Callable[[], float] = time.monotonic) -> "SsdTier":
        """Locks the directory, recovers what it holds and starts serving.

        Raises:
            BadSsdConfig, DirectoryBusy, DirectIoUnsupported: see there.
            OSError: the directory can't be used.
        """
        core = Core(config, io or OsIo(), clock)
        try:
            recover(core)
        except BaseException:
            core.directory.close()
            raise
        return cls(core)

    def __enter__(self) -> "SsdTier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, kind: Kind, keys: Bytes, payloads: Sequence[Buffer]) -> PutResult:
        """Stores records and returns when they can be read (not when they are durable).

        Args:
            kind: namespace and range of all of them.
            keys: one row of 32 bytes each.
            payloads: one buffer each; page-aligned ones of a multiple of 4 KiB are written from where they
                lie.

        Raises:
            BufferMismatch: not one buffer a key, or a payload too large for a segment.
        """
        core = self._core
        keys, views = self._checked(keys, payloads)
        if any(len(view) > core.segments.largest_record() for view in views):
            raise BufferMismatch(
                f"a payload of {max(map(len, views))} bytes does not fit a segment of {core.segments.segment_bytes}",
                f"put at most {core.segments.largest_record()} bytes, or configure larger segments",
            )
        return self._writer.write(kind, keys, views)

    def get(self, keys: Bytes, buffers: Sequence[Buffer]) -> GetResult:
        """Reads records into `buffers`.

        Args:
            keys: one row of 32 bytes each.
            buffers: one writable buffer each, at least as long as the record; of a miss the content is
                undefined. The
                part that a record fills should be page-aligned and a multiple of 4 KiB long: then nothing is
                copied.

        Raises:
            BufferMismatch: not one writable buffer a key, or one too small for its record.
        """
        core = self._core
        keys, views = self._checked(keys, buffers)
        if any(view.readonly for view in views):
            raise BufferMismatch("a buffer to read into is read-only", "give writable memory")
        result = np.full(len(views), -1, np.int64)
        busy = np.zeros(len(views), np.bool_)
        batch: IoBatch[list[bool]] = IoBatch(self._workers, core.clock, core.config.io_deadline_s)
        jobs: list[tuple[Spot, list[int]]] = []
        with core.lock:
            rows = core.table.find(keys)
            wanted = np.flatnonzero(rows >= 0) if core.serving else np.zeros(0, np.intp)
            spot = core.table.spot(rows[wanted])
            for i, length in zip(wanted.tolist(), spot.length.tolist(), strict=True):
                if len(views[i]) < length:
                    raise BufferMismatch(
                        f"record {i} has {length} bytes, its buffer {len(views[i])}", "give a larger one"
                    )
            order = np.lexsort((spot.block, spot.slot))
            wanted, spot = wanted[order], spot[order]
            segments = [core.segments.by_slot[slot] for slot in spot.slot.tolist()]
            runs = spot.runs(RUN_BYTES, RUN_RECORDS)
            for run in runs:
                segments[run.start].readers += 1
        for run in runs:
            items, part, segment = wanted[run].tolist(), spot[run], segments[run.start]
            targets = [views[i][:length] for i, length in zip(items, part.length.tolist(), strict=True)]
            jobs.append((part, items))
            batch.submit(partial(core.read_records, segment, part, targets), partial(self._read, segment))
        late = batch.wait(core.healthy)
        if late:
            core.io_stalled(f"{len(late)} reads")
        for number, (part, items) in enumerate(jobs):
            outcome = batch.outcomes.get(number)
            if isinstance(outcome, OSError):
                core.io_failed("read", outcome)
                if outcome.errno == errno.EIO:
                    self._drop_bad(keys[items], part, list(range(len(items))), checksum=False)
                continue
            if outcome is None:
                busy[items] = number in late
                continue
            for i, length, sound in zip(items, part.length.tolist(), outcome, strict=True):
                if sound:
                    result[i] = length
            if not all(outcome):
                bad = [at for at, sound in enumerate(outcome) if not sound]
                self._drop_bad(keys[items], part, bad, checksum=True)
        with core.lock:
            hit = result >= 0
            core.table.hit(np.unique(rows[hit]))
            core.counters.hits += int(np.count_nonzero(hit))
            core.counters.misses += int(np.count_nonzero(~hit))
            if (result > 0).any():
                core.breaker.succeeded("read")
        return GetResult(result, busy, batch.settled)

    def _read(self, segment: Segment) -> None:
        with self._core.lock:
            segment.readers -= 1
            if not segment.readers:
                self._core.lock.notify_all()

    def _drop_bad(self, keys: Bytes, spot: Spot, bad: list[int], *, checksum: bool) -> None:
        """Forgets records that can't be read, unless they lie elsewhere by now."""
        core = self._core
        with core.lock:
            rows = core.table.find(keys[bad])
            same = (core.table.slot[rows] == spot.slot[bad]) & (core.table.block[rows] == spot.block[bad]) & (rows >= 0)
            rows = np.unique(rows[same])
            dropped = core.table.keys[rows]
            places = core.drop(rows)
            core.counters.checksum_failures += len(bad) if checksum else 0
        if len(rows):
            core.config.on_change("dropped", dropped, places, places)

    def contains(self, keys: Bytes) -> Mask:
        """Returns for each key whether its record is known; reading it may still be a miss."""
        with self._core.lock:
            return np.asarray(self._core.table.find(self._rows_of_bytes(keys)) >= 0)

    def remove(self, keys: Bytes) -> int:
        """Forgets records and returns how many. In a full segment they come back with the next restart (keys
        name their
        bytes, so that does no harm); give up a namespace by naming those that count in the configuration."""
        core = self._core
        with core.lock:
            rows = np.unique(core.table.find(self._rows_of_bytes(keys)))
            rows = rows[rows >= 0]
            core.table.drop(rows)
            return len(rows)

    def retire(self, namespace: int) -> int:
        """Forgets all records of a namespace; returns how many."""
        core = self._core
        with core.lock:
            numbers = [number for number, kind in enumerate(core.kinds) if kind.namespace == namespace]
            rows = core.table.rows_of_kinds(np.array(numbers, np.uint16))
            core.table.drop(rows)
            return len(rows)

    def records(self, batch: int = 4096) -> Iterator[tuple[Bytes, Places]]:
        """Yields keys and places of all records, for whoever keeps a directory of its own."""
        core = self._core
        for start in range(0, core.table.capacity, batch):
            with core.lock:
                rows = start + np.flatnonzero(core.table.slot[start : start + batch] != 0xFFFF)
                keys = core.table.keys[rows]
                places = core.places(core.table.slot[rows], core.table.block[rows])
            if len(rows):
                yield keys, places

    def stats(self) -> SsdStats:
        """Returns a snapshot."""
        core = self._core
        with core.lock:
            counters = type(core.counters)(**{name: getattr(core.counters, name) for name in core.counters.__slots__})
            return SsdStats(
                on=core.serving,
                reason=core.breaker.reason,
                direct=core.directory.direct,
                epoch=core.directory.epoch,
                records=len(core.table),
                payload_bytes=core.table.payload_bytes,
                disk_bytes=core.segments.disk_bytes,
                cap_bytes=core.segments.cap_bytes,
                segments=len(core.segments.by_slot),
                memory_bytes=core.table.nbytes(),
                times_off=core.breaker.opened,
                counters=counters,
            )

    def wait_idle(self, timeout: float) -> bool:
        """Waits until the tier is on and nothing is left to seal or to make room for; returns False after `timeout`."""
        with self._core.lock:
            return self._core.lock.wait_for(self._keeper.idle, timeout)

    def check(self) -> list[str]:
        """Returns the violated invariants, empty when all is sound; walks everything in memory."""
        core = self._core
        with core.lock:
            faults = core.table.check() + core.segments.check()
            known = np.zeros(0x10000, np.bool_)
            known[list(core.segments.by_slot)] = True
            lost = np.unique(core.table.slot[core.table.slot != 0xFFFF])
            faults += [f"records in slot {slot}, which is no segment" for slot in lost[~known[lost]].tolist()]
            return faults

    def close(self) -> None:
        """Seals the open segment, so that the next start need not walk it, and gives the directory back. A
        disk that
        hangs delays this by the I/O deadline and no longer."""
        core = self._core
        with core.lock:
            if core.closed:
                return
            core.closed = True
            if core.segments.open:
                core.segments.open.state = State.SEALING
                core.segments.open = None
            core.lock.notify_all()
        settled = self._workers.stop(core.config.io_deadline_s)
        settled = self._keeper.close(core.config.io_deadline_s) and settled
        if settled:
            for segment in core.segments.by_slot.values():
                core.io.close(segment.fd)
        # With a thread still in the kernel, the descriptors stay open until the process ends: a reused number
        # would let that thread read or write another file.
        core.directory.close()

    @staticmethod
    def _rows_of_bytes(keys: Bytes) -> Bytes:
        keys = np.ascontiguousarray(keys, np.uint8)
        if keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise BufferMismatch(f"keys of shape {keys.shape}", f"give rows of {KEY_BYTES} bytes")
        return keys

    def _checked(self, keys: Bytes, buffers: Sequence[Buffer]) -> tuple[Bytes, list[memoryview]]:
        keys = self._rows_of_bytes(keys)
        if len(keys) != len(buffers):
            raise BufferMismatch(f"{len(keys)} keys with {len(buffers)} buffers", "give one buffer a key")
        return keys, [memoryview(cast(memoryview, buffer)).cast("B") for buffer in buffers]
