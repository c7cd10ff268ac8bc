"""What the tests of TempBuffers share: a pool of 16 MiB, and what is used of one."""

from __future__ import annotations

from omni_flow.data.client import MemoryManagerClient

from .conftest import Manager

MIB = 1 << 20
TEMP = {"pools": (), "temp_bytes": 16 * MIB, "node": "n"}


def used(client: MemoryManagerClient) -> int:
    """Bytes in slots."""
    stats = client.stats()
    return int(stats["temp_bytes"] - stats["temp_free_bytes"])


def all_free(server: Manager) -> None:
    """Wait until every slot is free and the books are right."""
    server.settle()
    with server.client(role="viewer") as client:
        while used(client) or client.stats()["temp_slots"] or client.stats()["temp_orphans"]:
            pass
        assert client.check() == []
        assert client.stats()["internal_errors"] == 0, server.log
