"""Layout of what the server and one client share about TempBuffers. No logic.

Generation table (`temp/generations`, written by the server alone): u32 per 4 KiB of the arena; a slot is the number
of its first 4 KiB and a descriptor is good while the generation there is its own.

Ledger (`temp/ledger`, one per client, seen by that client and the server only): u32 cells, four per entry.

    owned entries   [state, fan-out, slot, generation]   the server fills in slot and generation when it leases
                    NONE → LEASED (server) → PUBLISHED (client, fan-out first) → NONE (server, when all shares are back)
    held entries    [state, shares, slot, generation]
                    NONE → HELD (client, state last) → RELEASED (client) → NONE (server)

Each transition has one writer, so nothing is locked and nothing is counted twice if the client dies between any two
steps. Cells are aligned 32-bit stores.
"""

from __future__ import annotations

from typing import Final

NONE: Final = 0
LEASED: Final = 1
PUBLISHED: Final = 2
HELD: Final = 1
RELEASED: Final = 2

CELLS: Final = 4
OWNED: Final = 4096
HELD_ENTRIES: Final = 8192
LEDGER_BYTES: Final = (OWNED + HELD_ENTRIES) * CELLS * 4
BLOCK: Final = 4096
MAX_FANOUT: Final = 1 << 20
TEMP_ARENA: Final = 0
"""Number of the TempBuffer arena in a `TensorRef`."""
