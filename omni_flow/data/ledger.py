"""Layout of what the server and one client share about TempBuffers. No logic.

Slot table (`temp/slots`): u32 cells, four per 4 KiB of the arena; a slot is the number of its first 4 KiB.

    [generation, sole, back, 0]   a descriptor is good while the generation here is its own. `sole` is that generation
                    where its only reader may give the slot back to its owner directly: written by the owner before it
                    publishes, marked as taken by the reader who adopts it, unset by a reader who forwards it. `back`
                    becomes that generation when the reader is done; the owner may then lease the slot anew. For a dead
                    reader the server writes it.

Ledger (`temp/ledger`, one per client, seen by that client and the server only): u32 cells, four per entry.

    owned entries   [state, fan-out, slot, generation]   the server fills in slot and generation when it leases
                    NONE → LEASED (server) → PUBLISHED (client, fan-out first) → NONE (server, when all shares are back)
                    or, if the client may keep the slot, PUBLISHED → RENEWED (server, its new generation first)
                    → LEASED (client);
                    or, of one reader who has given it back, PUBLISHED → LEASED (client, its new generation last)
    held entries    [state, shares, slot, generation]
                    NONE → HELD (client, state last) → RELEASED (client) → NONE (server)
                    or, of the only reader, NONE → SOLE (client, state last) → NONE (client, `back` first); if it
                    forwards the share, SOLE → HELD
    forwards        [held entry, shares, slot, generation]   a ring of shares given on by who holds one itself; written
                    before MADE is raised, and taken in before the held entry is NONE again
    header          [MADE (client), TAKEN (server), TOP (client), 0]   forwards made and taken in, modulo 2^32; how many
                    held entries have ever been used

Each transition has one writer, so nothing is locked and nothing is counted twice if the client dies between any two
steps. Cells are aligned 32-bit stores, seen by others in the order in which they are made, and after the loads before
them, as x86 has it (`ORDERED`); on a machine with weaker order each step would need a barrier, so there the pool is
refused. Whoever adopts a forwarded share can only release it after MADE was raised, so a server that first looks for
releases and then for forwards knows of every share before it comes back.
"""

from __future__ import annotations

import os
from typing import Final

ORDERED: Final = os.uname().machine == "x86_64"
"""Whether this machine keeps the order of stores that the ledger needs."""

NONE: Final = 0
LEASED: Final = 1
PUBLISHED: Final = 2
RENEWED: Final = 3
HELD: Final = 1
RELEASED: Final = 2
SOLE: Final = 3

ROW: Final = 4
SOLE_AT: Final = 1
BACK_AT: Final = 2
"""Cells of a row of the slot table."""
TAKEN_MARK: Final = 0x80000000
"""What `sole` differs in from the generation once the reader has adopted it."""

CELLS: Final = 4
OWNED: Final = 4096
HELD_ENTRIES: Final = 8192
FORWARDS: Final = 1024
FORWARDS_AT: Final = OWNED + HELD_ENTRIES
HEADER: Final = FORWARDS_AT + FORWARDS
MADE: Final = HEADER * CELLS
TAKEN: Final = MADE + 1
TOP: Final = MADE + 2
"""Cells of the header."""
LEDGER_BYTES: Final = (HEADER + 1) * CELLS * 4
U32: Final = 0xFFFFFFFF
BLOCK: Final = 4096
MAX_FANOUT: Final = 1 << 20
TEMP_ARENA: Final = 0
"""Number of the TempBuffer arena in a `TensorRef`."""
