"""What the server knows of one slot and of one client of the TempBuffer pool, and how it reads the client's ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.ledger import (
    CELLS,
    FORWARDS,
    FORWARDS_AT,
    HELD_ENTRIES,
    MADE,
    NONE,
    OWNED,
    RELEASED,
    RENEWED,
    SOLE,
    TAKEN,
    TOP,
    U32,
)
from omni_flow.data.waits import WaitQueue

Cells = NDArray[np.uint32]
_NO_CELLS: Cells = np.zeros((0, CELLS), np.uint32)
_NO_PLACES: NDArray[np.intp] = np.zeros(0, np.intp)
_ENTRIES = tuple(range(OWNED - 1, -1, -1))
"""Numbers that all clients share: of their own they would be 130 KB a client."""
KEPT = 256
"""How many slots one client may keep unused."""


@dataclass(slots=True, eq=False)
class Slot:
    """A slot that is not free.

    `owner` is 0 for an orphan. `left` counts the shares not yet back, forwarded ones included, -1 before the first;
    `own` those of the owner's fan-out that it may retract. `forwards`: session → how many times it has given shares on
    in requests that are not over.
    """

    number: int
    size: int
    order: int
    owner: int
    entry: int
    generation: int
    left: int = -1
    own: int = 0
    adopt_until: float = 0.0
    settled: bool = False
    forwards: dict[int, int] | None = None

    def begin(self, generation: int) -> None:
        """It is its owner's again, of that generation, and not published."""
        self.generation = generation
        self.left, self.own, self.forwards = -1, 0, None


@dataclass(slots=True, eq=False)
class TempAccount:
    """One client of the pool; `owned` is entry → slot, `kept` those of them that it may have lying unused."""

    session: int
    pid: int
    name: str
    ledger: Cells | None = None
    cells: memoryview = field(default_factory=lambda: memoryview(bytes(4)).cast("I"))
    owned: dict[int, Slot] = field(default_factory=dict)
    kept: dict[int, Slot] = field(default_factory=dict)
    free_entries: list[int] = field(default_factory=list)
    bytes: int = 0
    kept_bytes: int = 0
    own_wait: WaitQueue = field(default_factory=WaitQueue)
    has_forwarded: bool = False
    _taken: int = 0

    def map(self, ledger: Cells) -> None:
        """Read and write this ledger from now on; an array (n, 4). Once; a session that never does costs little."""
        self.ledger = ledger
        self.free_entries = list(_ENTRIES)
        self.cells = ledger.reshape(-1).data

    @property
    def has_held(self) -> bool:
        """Whether it has ever held a share; most of many clients have not."""
        return self.ledger is not None and self.cells[TOP] != 0

    def held(self, all_of_it: bool = False) -> Cells:
        """Held entries of the ledger as an array (n, 4): those that the client says it has ever used."""
        if self.ledger is None:
            return _NO_CELLS
        used = HELD_ENTRIES if all_of_it else min(self.cells[TOP], HELD_ENTRIES)
        return self.ledger[OWNED : OWNED + used]

    def slots_held(self) -> list[int]:
        """Slots that its held entries name."""
        if not self.has_held:
            return []
        held = self.held()
        numbers: list[int] = held[held[:, 0] != NONE, 2].tolist()
        return numbers

    def shares(self) -> int:
        """How many entries hold shares, or have just released some."""
        return int(np.count_nonzero(self.held()[:, 0]))

    def sole(self) -> list[tuple[int, int]]:
        """(slot, generation) of what it holds as the only reader, who gives it back to its owner directly."""
        held = self.held(all_of_it=True)
        return [(number, generation) for _, _, number, generation in held[held[:, 0] == SOLE].tolist()]

    def released(self, dead: bool) -> tuple[Cells, NDArray[np.intp]]:
        """Held entries, and which of them the client has released; of a dead one all that it held."""
        if not dead and not self.has_held:
            return _NO_CELLS, _NO_PLACES
        held = self.held(all_of_it=dead)
        states = held[:, 0]
        return held, np.flatnonzero(states if dead else states == RELEASED)

    def forwards(self) -> Iterator[tuple[int, int, int] | None]:
        """(shares, slot, generation) of each forward since the last call; None for one of a share it does not hold."""
        if self.ledger is None:
            return
        made = self.cells[MADE]
        count = (made - self._taken) & U32
        if not count:
            return
        self.has_forwarded = True
        if count > FORWARDS:
            yield None
            count = 0
        for number in range(made - count, made):
            entry, shares, slot, generation = self.ledger[FORWARDS_AT + number % FORWARDS].tolist()
            holds = OWNED <= entry < FORWARDS_AT and self.ledger[entry].tolist()
            yield (shares, slot, generation) if holds and holds[0] and holds[2:] == [slot, generation] else None
        self._taken = self.cells[TAKEN] = made

    # -- slots it keeps -----------------------------------------------------------------------------------------

    def keep(self, slot: Slot) -> None:
        """Lease an owned slot anew, of a new generation."""
        assert self.ledger is not None
        self.used(slot.entry)
        self.ledger[slot.entry, 1:] = (0, slot.number, slot.generation)
        self.kept[slot.entry] = slot
        self.kept_bytes += slot.size
        self.ledger[slot.entry, 0] = RENEWED

    def used(self, entry: int) -> None:
        """A kept slot is in use or gone."""
        slot = self.kept.pop(entry, None)
        if slot is not None:
            self.kept_bytes -= slot.size

    def has_room_to_keep(self, size: int, limit: int) -> bool:
        """Whether one more slot may lie unused; looks which of the others have been used meanwhile."""
        if len(self.kept) < KEPT and self.kept_bytes + size <= limit:
            return True
        for entry in [e for e in self.kept if self.cells[e * CELLS] != RENEWED]:
            self.used(entry)
        return len(self.kept) < KEPT and self.kept_bytes + size <= limit

    def disown(self, slot: Slot) -> None:
        """A slot is no longer this client's."""
        if self.owned.get(slot.entry) is not slot:
            return
        del self.owned[slot.entry]
        self.used(slot.entry)
        self.bytes -= slot.size
        self.free_entries.append(slot.entry)
        if self.ledger is not None:
            self.ledger[slot.entry, 0] = NONE

    def check_integrity(self) -> list[str]:
        """Violated invariants, empty when sound."""
        faults: list[str] = []
        if sum(slot.size for slot in self.owned.values()) != self.bytes:
            faults.append("bytes miscounted")
        if sum(slot.size for slot in self.kept.values()) != self.kept_bytes:
            faults.append("kept bytes miscounted")
        if any(self.owned.get(entry) is not slot for entry, slot in self.kept.items()):
            faults.append("keeps what it does not own")
        if self.ledger is not None and len(self.owned) + len(self.free_entries) != OWNED:
            faults.append("entries miscounted")
        return faults
