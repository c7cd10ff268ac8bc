"""Arenas on a GPU, as engines and movers map them: by CUDA virtual memory, or by CUDA IPC where that can't be had.

`device_memory.py` is the manager's side.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omni_flow.data import cuda
from omni_flow.data.errors import BadArgument, DataError
from omni_flow.data.messages import ArenaInfo

if TYPE_CHECKING:
    import torch

log = logging.getLogger("omni_flow.data")


class _Bytes:
    """A range of device memory for whoever understands `__cuda_array_interface__`; keeps its arena alive."""

    def __init__(self, arena: DeviceArena, pointer: int, size: int) -> None:
        self._arena = arena
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
        }


class DeviceArena:
    """Device memory behind a file descriptor. The manager only holds it; `attach` maps it where it is used.

    A mapping without write access is enforced by the device (`readonly_enforced`): a kernel that writes there fails.
    """

    kind = "cuda-vmm"
    readonly_enforced = True

    def __init__(self, name: str, fd: int, size: int, device: int, page_size: int) -> None:
        self.name = name
        self.fd = fd
        self.size = size
        self.device = device
        self.page_size = page_size
        self.writable = False
        self.device_ptr = 0

    @classmethod
    def create(cls, name: str, size: int, device: int) -> DeviceArena:
        """Make an arena of at least `size` bytes on a device; makes no context.

        Raises:
            OutOfMemory: the device does not have that much.
            SystemRefusal: there is no CUDA driver.
        """
        grain = cuda.granularity(device)
        size = (size + grain - 1) // grain * grain
        return cls(name, cuda.create(size, device), size, device, grain)

    @classmethod
    def attach(cls, info: ArenaInfo, fd: int, *, write: bool) -> DeviceArena:
        """Map an arena of the manager, in the primary context of its device; takes over the descriptor it came with.

        Args:
            fd: that descriptor; -1 where it came with a handle of CUDA IPC instead.

        Raises:
            BadArgument: it lies in CPU memory.
            SystemRefusal: the driver refuses.
        """
        kind = next((kind for kind in (DeviceArena, IpcArena) if kind.kind == info.kind), None)
        if kind is None:
            if fd >= 0:
                os.close(fd)
            raise BadArgument(f"arena {info.name} lies in CPU memory", "use arena()")
        arena = kind(info.name, fd, info.size, info.device, info.page_size)
        try:
            cuda.use(info.device)
            arena.device_ptr = arena._map(info, write)
        except DataError:
            arena.close()
            raise
        arena.writable = write
        return arena

    def _map(self, info: ArenaInfo, write: bool) -> int:
        return cuda.map_fd(self.fd, info.size, info.device, write)

    @staticmethod
    def _undo(pointer: int, size: int, device: int) -> None:
        """Take a mapping away."""
        cuda.unmap(pointer, size)

    @classmethod
    def _undo_idle(cls, pointer: int, size: int, device: int) -> None:
        cuda.finish(device)
        cls._undo(pointer, size, device)

    def reader_fd(self) -> int:
        """A descriptor for a reader. The mapping, not the descriptor, decides about writing on a device."""
        return os.dup(self.fd)

    def _check(self, offset: int, length: int) -> None:
        if not self.device_ptr:
            raise BadArgument(f"arena {self.name} is not mapped in this process", "attach it")
        if offset < 0 or length < 0 or offset + length > self.size:
            raise BadArgument(f"{length} bytes at {offset} of arena {self.name} ({self.size} bytes)")

    def bytes_at(self, offset: int, length: int) -> Any:
        """An object with `__cuda_array_interface__` over a range."""
        self._check(offset, length)
        return _Bytes(self, self.device_ptr + offset, length)

    def torch(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the arena (no copy); DLPack by way of it."""
        import math

        import torch

        length = math.prod(shape) * dtype.itemsize
        flat = torch.as_tensor(self.bytes_at(offset, length), device=f"cuda:{self.device}")
        return flat.view(dtype).reshape(shape)

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy contiguous bytes of the host to `offset`; done when it returns."""
        self._check(offset, data.nbytes)
        cuda.use(self.device)
        cuda.copy_in(self.device_ptr + offset, data.ctypes.data, data.nbytes)

    def read(self, offset: int, length: int) -> NDArray[np.uint8]:
        """A copy of a range in host memory."""
        self._check(offset, length)
        out = np.empty(length, np.uint8)
        cuda.use(self.device)
        cuda.copy_out(out.ctypes.data, self.device_ptr + offset, length)
        return out

    def unmap_with_last_view(self) -> None:
        """Have the mapping go when neither this object nor a tensor over it is left, and the device has finished."""
        ending = weakref.finalize(self, self._undo_idle, self.device_ptr, self.size, self.device)
        ending.atexit = False

    def unmap(self) -> None:
        """Take the mapping away; nothing may use it any more."""
        if self.device_ptr:
            self._undo(self.device_ptr, self.size, self.device)
            self.device_ptr = 0

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last descriptor and mapping."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class IpcArena(DeviceArena):
    """Device memory of an owner process, mapped by its handle of CUDA IPC.

    CUDA IPC knows no read-only mapping: who asks for one can write as well, and is told so once. The memory is gone
    with its owner, whoever maps it.
    """

    kind = "cuda-ipc"
    readonly_enforced = False

    def _map(self, info: ArenaInfo, write: bool) -> int:
        if not write:
            _warn_not_enforced(info.device)
        return cuda.open_ipc(info.handle)

    @staticmethod
    def _undo(pointer: int, size: int, device: int) -> None:
        cuda.use(device)
        cuda.close_ipc(pointer)


@functools.cache
def _warn_not_enforced(device: int) -> None:
    log.warning("device %d: memory is shared by CUDA IPC, read-only mappings can be written all the same", device)
