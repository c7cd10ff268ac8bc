"""What the tier and its keeper share: the tables under one lock, and the two I/Os on records."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from omni_flow.data.ssd.breaker import Breaker, What
from omni_flow.data.ssd.config import Counters, Places, SsdConfig
from omni_flow.data.ssd.directory import SegmentDirectory
from omni_flow.data.ssd.errors import BadSsdConfig
from omni_flow.data.ssd.format import BLOCK, Header, Kind, blocks_of, checksum_of, write_header
from omni_flow.data.ssd.io import Io, Scratch, aligned_buffer, is_aligned, read_into, write_all
from omni_flow.data.ssd.segments import RUN_RECORDS, Extent, Segment, SegmentSet
from omni_flow.data.ssd.table import RecordTable, Rows, Spot


class Core:
    """State of one open tier. `lock` guards `table`, `segments`, `breaker`, `kinds` and `counters`."""

    def __init__(self, config: SsdConfig, io: Io, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.io = io
        self.clock = clock
        self.lock = threading.Condition()
        self.segments = SegmentSet(config.cap_bytes, config.segment())
        self.table = RecordTable(config.records())
        self.breaker = Breaker(config.errors_to_open, config.first_probe_s)
        self.kinds: list[Kind] = []
        self._kind_numbers: dict[Kind, int] = {}
        self.counters = Counters()
        self.scratch = Scratch()
        self._headers = threading.local()
        self._telling = threading.Lock()
        self._told = True
        self.closed = False
        # Bytes that reclaim may still carry over without exceeding the write amplification.
        self.move_budget = 0.0
        self.directory = SegmentDirectory(config.path, io, require_direct=config.require_direct)

    @property
    def serving(self) -> bool:
        """Whether the disk may be asked. Needs the lock."""
        return self.breaker.closed and not self.closed

    def healthy(self) -> bool:
        """Whether the breaker lets I/O through."""
        with self.lock:
            return self.breaker.closed

    def kind_number(self, kind: Kind) -> int:
        """Returns the table's number for a kind. Needs the lock."""
        number = self._kind_numbers.get(kind)
        if number is None:
            number = len(self.kinds)
            if number > 0xFFFF:
                raise BadSsdConfig("more than 65536 kinds of records", "name fewer layer and head ranges")
            self._kind_numbers[kind] = number
            self.kinds.append(kind)
        return number

    def places(self, slots: npt.NDArray[np.uint16], blocks: npt.NDArray[np.uint32]) -> Places:
        """Returns the places of records. Needs the lock."""
        out = blocks.astype(np.uint64)
        for slot in np.unique(slots).tolist():
            out[slots == slot] |= np.uint64(self.segments.by_slot[slot].serial << 32)
        return out

    def drop(self, rows: Rows) -> Places:
        """Forgets records and returns where they were. Needs the lock."""
        places = self.places(self.table.slot[rows], self.table.block[rows])
        self.table.drop(rows)
        return places

    def io_failed(self, what: What, error: OSError) -> None:
        """Notes a failed I/O."""
        with self.lock:
            self.counters.io_errors += 1
            self.breaker.failed(what, error, self.clock())
            self.lock.notify_all()
        self.tell_state()

    def io_stalled(self, what: str) -> None:
        """Notes an I/O past its deadline."""
        with self.lock:
            self.counters.stalls += 1
            self.breaker.stalled(what, self.clock())
            self.lock.notify_all()
        self.tell_state()

    def tell_state(self) -> None:
        """Tells whoever listens, if the tier went off or on. Must not be called with the lock."""
        with self._telling:
            with self.lock:
                on, reason = self.breaker.closed, self.breaker.reason
            if on != self._told:
                self._told = on
                self.config.on_state(on, reason)

    def write_records(
        self, extent: Extent, kind: Kind, keys: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> list[int]:
        """Writes records into their extent with one call; returns the payloads' checksums.

        Payloads that are page-aligned and a multiple of 4 KiB long go to disk from where they lie, others by
        way of the thread's scratch memory.

        Raises:
            OSError: nothing of the extent may be used.
        """
        headers = self._header_room()
        checksums: list[int] = []
        vectors: list[memoryview] = []
        odd = sum(len(p) + BLOCK for p in payloads if not is_aligned(p))
        room = self.scratch.room(odd) if odd else memoryview(b"")
        for i, payload in enumerate(payloads):
            checksum = checksum_of(payload)
            block = headers[i * BLOCK : (i + 1) * BLOCK]
            write_header(block, Header(extent.segment.ident, extent.ordinal + i, kind, keys[i], len(payload), checksum))
            vectors.append(block)
            if len(payload) and not is_aligned(payload):
                padded = (blocks_of(len(payload)) - 1) * BLOCK
                room[: len(payload)] = payload
                room[len(payload) : padded] = bytes(padded - len(payload))
                payload, room = room[:padded], room[padded:]
            if len(payload):
                vectors.append(payload)
            checksums.append(checksum)
        write_all(self.io, extent.segment.fd, vectors, extent.block * BLOCK)
        return checksums

    def read_records(self, segment: Segment, spot: Spot, targets: Sequence[memoryview]) -> list[bool]:
        """Reads records that lie one behind the other with one call; returns which of them are what was
        written.

        `targets[i]` takes the payload of record i and is as long; see `write_records` for alignment.

        Raises:
            OSError: the targets hold anything.
        """
        vectors: list[memoryview] = []
        bounced: list[tuple[memoryview, memoryview]] = []
        odd = sum(len(t) + BLOCK for t in targets if not is_aligned(t))
        room = self.scratch.room(odd) if odd else memoryview(b"")
        for i, target in enumerate(targets):
            if i:
                vectors.append(self.scratch.block)
            if is_aligned(target):
                direct = target
            else:
                padded = (blocks_of(len(target)) - 1) * BLOCK
                direct, room = room[:padded], room[padded:]
                bounced.append((target, direct[: len(target)]))
            if len(direct):
                vectors.append(direct)
        wanted = sum(len(vector) for vector in vectors)
        got = read_into(self.io, segment.fd, vectors, (int(spot.block[0]) + 1) * BLOCK) if wanted else 0
        for target, source in bounced:
            target[:] = source
        sound, end = [], 0
        for i, target in enumerate(targets):
            end += (BLOCK if i else 0) + (blocks_of(len(target)) - 1) * BLOCK
            sound.append(end <= got and checksum_of(target) == int(spot.checksum[i]))
        return sound

    def _header_room(self) -> memoryview:
        room: memoryview | None = getattr(self._headers, "room", None)
        if room is None:
            # Only the heads of its blocks are ever written, so the rest stays zero.
            room = self._headers.room = aligned_buffer(RUN_RECORDS * BLOCK)
        return room
