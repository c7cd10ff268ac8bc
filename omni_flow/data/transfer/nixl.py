"""The nixl driver: NVIDIA's NIXL with its UCX backend (RDMA, NVLink, shared memory, tcp). Extra `nixl`."""

import importlib
import importlib.util
import os
import threading
from typing import Any, Final, Literal

import numpy as np

from omni_flow.data.transfer.base import Done, Endpoint
from omni_flow.data.transfer.errors import DriverAbsent, NativeFailure, PeerUnreachable
from omni_flow.data.transfer.native import Addresses, NativeDriver, NativeOptions, Task

_FIRST_WAIT_S: Final = 0.0001
_LAST_WAIT_S: Final = 0.002


def _api() -> Any:
    for module in ("nixl_cu12", "nixl_cu13"):
        if importlib.util.find_spec(module):
            return importlib.import_module(f"{module}._api")
    raise DriverAbsent("neither nixl_cu12 nor nixl_cu13 is installed; pip install 'omni-flow[nixl]'")


class NixlDriver(NativeDriver):
    """One NIXL agent. Its calls are short and made under a lock; completion can only be polled for."""

    name = "nixl"

    def __init__(self, options: NativeOptions, done: Done) -> None:
        super().__init__(options, done)
        if not options.trusted_network:
            os.environ["UCX_NET_DEVICES"] = "lo"
        api = _api()
        self._agent_lock = threading.Lock()
        self._peers: dict[bytes, str] = {}
        self._registered: list[Any] = []
        self._errors: type[BaseException] | tuple[type[BaseException], ...] = RuntimeError
        self._agent = api.nixl_agent(self.boot.hex(), api.nixl_agent_config(backends=["UCX"]))
        native = [
            value for name, value in vars(api.nixlBind).items() if name.startswith("nixl") and name.endswith("Error")
        ]
        self._errors = (RuntimeError, *native)

    def _attach(self, base: int, size: int) -> None:
        with self._agent_lock:
            self._registered.append(self._agent.register_memory([(base, size, 0, "")], "DRAM"))

    def _metadata(self) -> tuple[str, int, bytes]:
        with self._agent_lock:
            return self.options.host, 0, self._agent.get_agent_metadata()

    def _move(
        self,
        direction: Literal["read", "write"],
        peer: Endpoint,
        local: Addresses,
        remote: Addresses,
        lengths: Addresses,
        task: Task,
    ) -> None:
        device = np.zeros_like(lengths)
        wait, pause = threading.Event(), _FIRST_WAIT_S
        try:
            with self._agent_lock:
                agent = self._peer(peer)
                ours = self._agent.get_xfer_descs(np.stack([local, lengths, device], axis=1), "DRAM")
                theirs = self._agent.get_xfer_descs(np.stack([remote, lengths, device], axis=1), "DRAM")
                handle = self._agent.initialize_xfer(direction.upper(), ours, theirs, agent)
        except self._errors as error:
            self._forget(peer)
            raise PeerUnreachable(f"NIXL does not reach {peer!r}: {error}") from error
        try:
            with self._agent_lock:
                state = self._agent.transfer(handle)
            while state == "PROC":
                task.left()
                wait.wait(pause)
                pause = min(pause * 2, _LAST_WAIT_S)
                with self._agent_lock:
                    state = self._agent.check_xfer_state(handle)
        except self._errors as error:
            self._forget(peer)
            raise PeerUnreachable(f"NIXL lost {peer!r}: {error}") from error
        finally:
            self._release(handle)
        if state != "DONE":
            self._forget(peer)
            raise NativeFailure(f"NIXL ended a {direction} with {state}")

    def _release(self, handle: Any) -> None:
        """A transfer that cannot be aborted may still write: then only the end of the process stops it."""
        try:
            with self._agent_lock:
                self._agent.release_xfer_handle(handle)
        except self._errors:
            os._exit(74)

    def _peer(self, peer: Endpoint) -> str:
        """The peer's agent, made known again when its endpoint has changed."""
        known = self._peers.get(peer.blob)
        if known is None:
            name = self._agent.add_remote_agent(peer.blob)
            known = self._peers[peer.blob] = name.decode() if isinstance(name, bytes) else name
        return known

    def _forget(self, peer: Endpoint) -> None:
        with self._agent_lock:
            name = self._peers.pop(peer.blob, None)
            if name is not None:
                try:
                    self._agent.remove_remote_agent(name)
                except self._errors as error:
                    raise NativeFailure(f"NIXL keeps a lost peer: {error}") from error
