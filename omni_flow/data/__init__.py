"""Data flow: where bytes are. Knows no graph; a library and a server of its own.

One memory manager per node owns KV pages, temporary tensors and weights; roles map its memory. Open `server.py`
first, then `docs/data_plane.md` for the map. Users need the clients below, `launch.start` to run a manager from
Python, and `omni-flow memory serve` to run one from a shell."""

from typing import TYPE_CHECKING

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError
from omni_flow.data.temp_client import TempClient

if TYPE_CHECKING:
    from omni_flow.data.aio_client import AsyncMemoryManagerClient
    from omni_flow.data.temp_aio import AsyncTempClient

__all__ = ["AsyncMemoryManagerClient", "AsyncTempClient", "DataError", "MemoryManagerClient", "TempClient"]


def __getattr__(name: str) -> object:
    """The asynchronous clients; a process that needs neither loads no asyncio, and so dies the faster."""
    if name == "AsyncMemoryManagerClient":
        from omni_flow.data.aio_client import AsyncMemoryManagerClient

        return AsyncMemoryManagerClient
    if name == "AsyncTempClient":
        from omni_flow.data.temp_aio import AsyncTempClient

        return AsyncTempClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
