"""The segments of a tier and the room in the one that is being written. Knows no I/O; the tier's lock guards it."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from omni_flow.data.ssd.errors import BadSsdConfig
from omni_flow.data.ssd.format import BLOCK, blocks_of, footer_blocks
from omni_flow.data.ssd.table import NO_SLOT

FILE_OVERHEAD = 16 << 10
"""Bytes a file may take beyond its length (extent tree); counted so that the cap holds for what `du` sees."""

RUN_BYTES = 1 << 20
RUN_RECORDS = 256


class State(Enum):
    """SPARE → OPEN → SEALING → SEALED → LEAVING."""

    SPARE = 0
    OPEN = 1
    SEALING = 2
    SEALED = 3
    LEAVING = 4


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file.

    `serial` is unique while the process lives. `writers` counts puts that have room here and haven't been
    published, `readers` I/Os that read from it; a file is sealed only without writers and used anew only
    without readers.
    """

    ident: int
    serial: int
    slot: int
    fd: int
    path: str
    blocks: int
    state: State
    tail: int = 0
    records: int = 0
    kinds: set[int] = field(default_factory=set)
    damaged: bool = False
    writers: int = 0
    readers: int = 0

    @property
    def disk_bytes(self) -> int:
        """What the file counts for against the cap."""
        return self.blocks * BLOCK + FILE_OVERHEAD


@dataclass(frozen=True, slots=True)
class Extent:
    """Room for `count` consecutive records."""

    segment: Segment
    block: int
    ordinal: int
    count: int


class SegmentSet:
    """All segments by slot, one of them open at most."""

    def __init__(self, cap_bytes: int, segment_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.segment_bytes = segment_bytes
        self.by_slot: dict[int, Segment] = {}
        self.by_serial: dict[int, Segment] = {}
        self.open: Segment | None = None
        self.spares: deque[Segment] = deque()
        self._serial = 0
        self._free_slots: list[int] = []
        self._next_slot = 0
        # The directory itself, the lock and the probe.
        self.disk_bytes = FILE_OVERHEAD
        self._reserved = 0
        # Set when no second spare can be had: then writers may take the last one.
        self.cornered = False
        # A writer found no room.
        self.starved = False

    def reserve(self, sign: int = 1) -> None:
        """Accounts for a segment file that is about to be made (or, with -1, was not)."""
        self._reserved += sign * (self.segment_bytes + FILE_OVERHEAD)
        self.disk_bytes += sign * (self.segment_bytes + FILE_OVERHEAD)

    def add(self, ident: int, fd: int, path: str, blocks: int, state: State, *, reserved: bool = False) -> Segment:
        """Takes a file in, which `reserve` may have accounted for already."""
        if not self._free_slots and self._next_slot == NO_SLOT:
            raise BadSsdConfig(f"more than {NO_SLOT} segments", "give larger segments")
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._next_slot
            self._next_slot += 1
        self._serial += 1
        segment = Segment(ident, self._serial, slot, fd, path, blocks, state)
        self.by_slot[slot] = self.by_serial[segment.serial] = segment
        self.disk_bytes += segment.disk_bytes
        if reserved:
            self.reserve(-1)
        if state is State.SPARE:
            self.spares.append(segment)
        return segment

    def remove(self, segment: Segment) -> None:
        """Lets a file go; no record may be left in it."""
        del self.by_slot[segment.slot], self.by_serial[segment.serial]
        self._free_slots.append(segment.slot)
        self.disk_bytes -= segment.disk_bytes

    def fits_another(self) -> bool:
        """Whether the cap has room for one more segment."""
        return self.disk_bytes + self.segment_bytes + FILE_OVERHEAD <= self.cap_bytes

    def oldest(self, states: Iterable[State]) -> Segment | None:
        """Returns the oldest segment in one of `states`."""
        wanted = [segment for segment in self.by_slot.values() if segment.state in set(states)]
        return min(wanted, key=lambda segment: segment.ident, default=None)

    def wants_spare(self) -> bool:
        """Whether another segment should be made ready.

        Of two spares writers open the first; the last one is for what the next reclaim carries over, so that no
        record in use is lost for want of room. While that costs an old segment, it waits until the open one is half
        full.
        """
        if len(self.spares) >= 2:
            return False
        half_full = self.open is not None and (self.open.damaged or self.open.tail * 2 >= self.open.blocks)
        return half_full or self.starved or self.fits_another()

    def largest_record(self) -> int:
        """Returns the bytes of payload that fit an empty segment."""
        return self.segment_bytes - (1 + footer_blocks(1, 1)) * BLOCK

    def allocate(self, lengths: Sequence[int], kind: int) -> Extent | None:
        """Takes room for the first of `lengths`, and for as many more as make one I/O; None when there is none now.

        The caller has the extent's segment as a writer twice: once for the I/O, once until it has published.
        """
        segment = self.open
        extent = self._take(segment, lengths, kind) if segment and not segment.damaged else None
        if extent is None and len(self.spares) > (0 if self.cornered else 1):
            if segment:
                segment.state = State.SEALING
            self.open = self.spares.popleft()
            self.open.state = State.OPEN
            extent = self._take(self.open, lengths, kind)
        self.starved = extent is None
        return extent

    def allocate_carried(self, lengths: Sequence[int], kind: int) -> Extent | None:
        """The same for records that reclaim carries over; None when there is no spare, or no room in it."""
        segment = self.spares[-1] if self.spares else None
        return self._take(segment, lengths, kind) if segment and not segment.damaged else None

    def _take(self, segment: Segment, lengths: Sequence[int], kind: int) -> Extent | None:
        kinds = len(segment.kinds | {kind})
        count, need, payload = 0, 0, 0
        for length in lengths:
            more = blocks_of(length)
            end = segment.tail + need + more + footer_blocks(segment.records + count + 1, kinds)
            if end > segment.blocks or (count and payload + length > RUN_BYTES) or count == RUN_RECORDS:
                break
            count, need, payload = count + 1, need + more, payload + length
        if not count:
            return None
        extent = Extent(segment, segment.tail, segment.records, count)
        segment.tail += need
        segment.records += count
        segment.kinds.add(kind)
        segment.writers += 2
        return extent

    def check(self) -> list[str]:
        """Returns the violated invariants."""
        faults = []
        counted = FILE_OVERHEAD + self._reserved + sum(segment.disk_bytes for segment in self.by_slot.values())
        if counted != self.disk_bytes:
            faults.append(f"segments take {counted} bytes, {self.disk_bytes} are accounted")
        if self.disk_bytes > self.cap_bytes:
            faults.append(f"{self.disk_bytes} bytes on disk, the cap is {self.cap_bytes}")
        opened = [segment for segment in self.by_slot.values() if segment.state is State.OPEN]
        if opened != ([self.open] if self.open else []):
            faults.append(f"{len(opened)} segments say they are open")
        faults += [f"segment {s.ident:x} is over-full" for s in self.by_slot.values() if s.tail > s.blocks]
        return faults
