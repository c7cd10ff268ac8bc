"""Data flow: where bytes are. Knows no graph; a library and a server of its own.

One memory manager per node owns KV pages, temporary tensors and weights; roles map its memory. Open `server.py`
first, then `docs/data_plane.md` for the map. Users need the clients below, `launch.start` to run a manager from
Python, and `omni-flow memory serve` to run one from a shell."""

from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError
from omni_flow.data.temp_aio import AsyncTempClient
from omni_flow.data.temp_client import TempClient

__all__ = ["AsyncMemoryManagerClient", "AsyncTempClient", "DataError", "MemoryManagerClient", "TempClient"]
