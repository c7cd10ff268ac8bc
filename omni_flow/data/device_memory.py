"""Device memory as the manager makes it and hands it out.

By CUDA virtual memory a descriptor keeps the memory, and the manager needs no CUDA context. Where a driver can't export
descriptors (some virtual machines and containers), an owner process allocates it and CUDA IPC shares it: a context of
some hundred MiB on each such device, no read-only mappings, and memory that is gone with its owner. So the manager ends
when an owner does, with an error that names it: whoever restarts it and its clients know what to do then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from omni_flow.data import cuda, cuda_owner
from omni_flow.data.cuda_owner import Allocated, Owner
from omni_flow.data.device_arena import DeviceArena, IpcArena
from omni_flow.data.errors import DataError, SystemRefusal
from omni_flow.data.messages import ArenaInfo

log = logging.getLogger("omni_flow.data")
Sharing = Literal["auto", "vmm", "ipc"]
"""How device memory is shared: by virtual memory and else by CUDA IPC; by virtual memory or not at all; by CUDA IPC."""


class OwnedArena:
    """Memory of an owner process, as the manager hands it out: a handle and no descriptor."""

    kind = IpcArena.kind
    page_size = cuda.IPC_GRAIN

    def __init__(self, name: str, size: int, owner: Owner, memory: Allocated) -> None:
        self.name = name
        self.size = size
        self.device = owner.device
        self._owner = owner
        self._memory = memory

    @property
    def info(self) -> ArenaInfo:
        """What a client opens it by."""
        return ArenaInfo(
            self.name, self.size, self.kind, self.page_size, self.device, self._memory.handle, readonly_enforced=False
        )

    def close(self) -> None:
        """Give the memory back; nobody may have it mapped any more."""
        self._owner.free(self._memory.number)


Made = Callable[[DeviceArena | OwnedArena | DataError], None]
"""Told of the arena, or why there is none."""


def _whole(size: int) -> int:
    """What an owner makes for `size` bytes."""
    return -(-size // cuda.IPC_GRAIN) * cuda.IPC_GRAIN


class DeviceMemory:
    """Makes arenas on devices.

    Args:
        sharing: how.
        watch: calls back when a descriptor can be read.
        lost: told when an owner has ended.
    """

    def __init__(
        self,
        sharing: Sharing,
        watch: Callable[[int, Callable[[int], None]], None],
        lost: Callable[[DataError], None],
    ) -> None:
        self._sharing = sharing
        self._watch = watch
        self._lost = lost
        self._owners: dict[int, Owner] = {}

    def create(self, name: str, size: int, device: int) -> DeviceArena | OwnedArena:
        """Make an arena of at least `size` bytes; waits for an owner process.

        Raises:
            OutOfMemory: the device does not have that much.
            SystemRefusal: there is no such device, or no way to share its memory.
        """
        exported = self._exported(name, size, device)
        if exported is not None:
            return exported
        owner, size = self._owner(device), _whole(size)
        return OwnedArena(name, size, owner, owner.allocate(size))

    def request(self, name: str, size: int, device: int, made: Made) -> None:
        """The same without waiting: an owner process may take long. `made` is told, now or later; what needs no owner
        is raised here."""
        exported = self._exported(name, size, device)
        if exported is not None:
            made(exported)
            return
        owner, size = self._owner(device), _whole(size)

        def answered(memory: Allocated | DataError) -> None:
            made(memory if isinstance(memory, DataError) else OwnedArena(name, size, owner, memory))

        owner.request(size, answered)

    def _exported(self, name: str, size: int, device: int) -> DeviceArena | None:
        """An arena of virtual memory; None where an owner has to make it."""
        exports = cuda.exports_descriptors(device)  # refused where there is no such device: no owner for any number
        if self._sharing == "ipc" or device in self._owners:
            return None
        if self._sharing == "vmm":
            return DeviceArena.create(name, size, device)
        reason: object = "its driver says so"
        if exports:
            try:
                return DeviceArena.create(name, size, device)
            except SystemRefusal as error:
                reason = error
        log.warning("device %d can't export memory as descriptors, it is shared by CUDA IPC: %s", device, reason)
        return None

    def _owner(self, device: int) -> Owner:
        owner = self._owners.get(device)
        if owner is None:
            owner = self._owners[device] = Owner(device, cuda_owner.COMMAND)
            started = owner
            self._watch(owner.fileno(), lambda _events: self._take(started))
        return owner

    def _take(self, owner: Owner) -> None:
        if not owner.take():
            self._lost(owner.gone())

    def tick(self, now: float) -> float | None:
        """Give up owners that do not answer. Returns when to come again."""
        return min((due for owner in self._owners.values() if (due := owner.tick(now)) is not None), default=None)

    def close(self) -> None:
        """End the owners."""
        for owner in self._owners.values():
            owner.close()
