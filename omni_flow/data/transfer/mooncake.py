"""The mooncake driver: Mooncake's transfer engine over tcp (RDMA where its wheel and the host have it). Extra
`mooncake`; its wheel needs the system libraries libibverbs1, librdmacm1, libnuma1, libcurl4 and liburing2."""

import importlib
from typing import Any, Literal

from omni_flow.data.transfer.base import Done, Endpoint
from omni_flow.data.transfer.errors import DriverAbsent, NativeFailure, PeerUnreachable
from omni_flow.data.transfer.native import Addresses, NativeDriver, NativeOptions, Task


class MooncakeDriver(NativeDriver):
    """One transfer engine with peer-to-peer handshakes. A batch that has begun cannot be cancelled: a cancelled or late
    job ends with its batch."""

    name = "mooncake"

    def __init__(self, options: NativeOptions, done: Done) -> None:
        try:
            engine = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise DriverAbsent(
                f"mooncake does not load: {error}; install libibverbs1, librdmacm1, libnuma1, libcurl4, liburing2"
            ) from error
        super().__init__(options, done)
        self._engine: Any = engine.TransferEngine()
        if self._engine.initialize(options.host, "P2PHANDSHAKE", "tcp", ""):
            raise NativeFailure(f"mooncake does not start on {options.host}")

    def _attach(self, base: int, size: int) -> None:
        if self._engine.register_memory(base, size):
            raise NativeFailure(f"mooncake does not register {size} bytes")

    def _metadata(self) -> tuple[str, int, bytes]:
        return self.options.host, self._engine.get_rpc_port(), b""

    def _move(
        self,
        direction: Literal["read", "write"],
        peer: Endpoint,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        task: Task,
    ) -> None:
        move = self._engine.batch_transfer_sync_read if direction == "read" else self._engine.batch_transfer_sync_write
        code = move(f"{peer.host}:{peer.port}", local.tolist(), remote.tolist(), lengths.tolist())
        if code:
            raise PeerUnreachable(f"mooncake moved nothing to or from {peer!r}: code {code}")
