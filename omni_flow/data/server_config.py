"""What a memory manager serves: the part of a configuration that is not a pool's."""

from __future__ import annotations

from typing import Final

import msgspec

from omni_flow.data.arguments import YEAR_S, endpoint, real, text, whole
from omni_flow.data.device_memory import Sharing
from omni_flow.data.errors import BadArgument
from omni_flow.data.pool_spec import PoolSpec

_PATH_BYTES: Final = 107
_POOL_NAMES: Final = 3000
"""Bytes that the names of all pools may have, 32 more for each: their numbers (`STATS`) are one message."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a memory manager serves.

    Args:
        path: of the Unix socket, in a directory of this user.
        node: name of the node in descriptors, at most 32 characters; default: the host's.
        pools: KV pools.
        temp_bytes: arena of the TempBuffer pool; 0: none.
        temp_large_bytes: part behind it for buffers larger than 256 MiB.
        temp_client_bytes: most one client may hold of it; 0: no bound.
        orphan_s: how long a published buffer of a dead producer waits for consumers who have not adopted it.
        prefetch_bytes: most that prefetches from L3 may have under way.
        uids: further users who may connect.
        endpoints: ZMQ endpoints to serve as well (`ipc://…`, `tcp://127.0.0.1:…`).
        shared_key: secret of all clients over ZMQ (CURVE); without one tcp endpoints are loopback only.
        huge: use huge pages where there are any.
        populate: `now`, `background` or `lazy`; see `Arena.create`.
        device_memory: how memory of devices is shared: `vmm`, by CUDA virtual memory, read-only where asked for;
            `ipc`, by CUDA IPC, which can't enforce that; `auto`, the first where the device can and else the second.
        weight_linger_s: how long weights stay after their last user has gone.
        movers: command lines of mover processes to run.

    Raises:
        BadArgument: a value that can't be served, by its name; wherever it comes from.
    """

    path: str
    node: str = ""
    pools: tuple[PoolSpec, ...] = ()
    temp_bytes: int = 0
    temp_large_bytes: int = 0
    temp_client_bytes: int = 0
    orphan_s: float = 30.0
    prefetch_bytes: int = 256 << 20
    uids: tuple[int, ...] = ()
    endpoints: tuple[str, ...] = ()
    shared_key: str = ""
    huge: bool = True
    populate: str = "now"
    device_memory: Sharing = "auto"
    weight_linger_s: float = 300.0
    movers: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        text("path", self.path, _PATH_BYTES)
        if len(self.path.encode()) > _PATH_BYTES:
            raise BadArgument(f"path: {self.path}", f"give one of at most {_PATH_BYTES} bytes, as sockets have it")
        text("node", self.node, 32, least=0)
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise BadArgument(f"two pools of one name among {', '.join(names)}", "name them differently")
        if sum(len(name.encode()) + 32 for name in names) > _POOL_NAMES:
            raise BadArgument(
                f"{len(names)} pools of such names are more than a message tells of", "name fewer, shorter"
            )
        for given in self.endpoints:
            endpoint("endpoints", given)
        whole("temp_bytes", self.temp_bytes)
        whole("temp_large_bytes", self.temp_large_bytes)
        whole("temp_client_bytes", self.temp_client_bytes)
        whole("prefetch_bytes", self.prefetch_bytes)
        real("orphan_s", self.orphan_s, 0.0, YEAR_S)
        real("weight_linger_s", self.weight_linger_s, 0.0, YEAR_S)
