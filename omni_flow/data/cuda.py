"""The few calls of the CUDA driver the data plane needs, by ctypes: no CUDA package, no context unless asked for.

Virtual memory management (`cuMemCreate`, export, import, map) as in the CUDA Driver API, section "Virtual Memory
Management". A process that only creates and exports memory has no context: it costs the device about 4 MiB. Where that
is not to be had: ordinary allocations, exported by handles of CUDA IPC.
"""

from __future__ import annotations

import ctypes as c
import functools
import os
import subprocess
import sys
from typing import Any, Final

from omni_flow.data.errors import OutOfMemory, SystemRefusal

READ: Final = 1
READ_WRITE: Final = 3
_PINNED: Final = 1
_DEVICE: Final = 1
_POSIX_FD: Final = 1
_HOST: Final = 1
_ON_DEVICE: Final = 2
_POSIX_FD_SUPPORTED: Final = 103
_COMPUTE_CAPABILITY: Final = (75, 76)
_LAZY_PEER_ACCESS: Final = 1
IPC_HANDLE_BYTES: Final = 64
IPC_GRAIN: Final = 2 << 20
"""Smaller allocations may share a block, and a handle would give out all of it."""
MAX_PITCH: Final = (1 << 31) - 1
_NO_DEVICE: Final = 3
_ASK: Final = f"from omni_flow.data import cuda; raise SystemExit(0 if cuda.available() else {_NO_DEVICE})"
_ASK_S: Final = 60.0


class _Location(c.Structure):
    _fields_ = (("type", c.c_int), ("id", c.c_int))


class _Flags(c.Structure):
    _fields_ = (
        ("compression", c.c_ubyte),
        ("rdma", c.c_ubyte),
        ("usage", c.c_ushort),
        ("reserved", c.c_ubyte * 4),
    )


class _Prop(c.Structure):
    _fields_ = (
        ("type", c.c_int),
        ("handles", c.c_int),
        ("location", _Location),
        ("win32", c.c_void_p),
        ("flags", _Flags),
    )


class _Access(c.Structure):
    _fields_ = (("location", _Location), ("flags", c.c_int))


class _Copy2D(c.Structure):
    _fields_ = (
        ("src_x", c.c_size_t),
        ("src_y", c.c_size_t),
        ("src_type", c.c_int),
        ("src_host", c.c_void_p),
        ("src_device", c.c_uint64),
        ("src_array", c.c_void_p),
        ("src_pitch", c.c_size_t),
        ("dst_x", c.c_size_t),
        ("dst_y", c.c_size_t),
        ("dst_type", c.c_int),
        ("dst_host", c.c_void_p),
        ("dst_device", c.c_uint64),
        ("dst_array", c.c_void_p),
        ("dst_pitch", c.c_size_t),
        ("width", c.c_size_t),
        ("height", c.c_size_t),
    )


class _IpcHandle(c.Structure):
    _fields_ = (("reserved", c.c_ubyte * IPC_HANDLE_BYTES),)


@functools.cache
def _driver() -> c.CDLL:
    try:
        library = c.CDLL("libcuda.so.1")
    except OSError as error:
        raise SystemRefusal(f"no CUDA driver: {error}", "device arenas need an NVIDIA driver") from error
    _ck(library.cuInit(0), "cuInit", library)
    return library


def _ck(code: int, what: str, library: c.CDLL | None = None) -> None:
    if not code:
        return
    library = library or _driver()
    name = c.c_char_p()
    library.cuGetErrorName(code, c.byref(name))
    text = f"{what}: {(name.value or b'unknown').decode()} ({code})"
    if code == 2:
        raise OutOfMemory(text, "lower the size of the device arena")
    raise SystemRefusal(text, "see the CUDA driver's documentation")


def _call(name: str, *arguments: Any) -> None:
    _ck(getattr(_driver(), name)(*arguments), name)


def _prop(device: int) -> _Prop:
    prop = _Prop()
    prop.type, prop.handles = _PINNED, _POSIX_FD
    prop.location.type, prop.location.id = _DEVICE, device
    return prop


def available() -> bool:
    """Whether there is a driver with at least one device."""
    try:
        count = c.c_int()
        _call("cuDeviceGetCount", c.byref(count))
    except SystemRefusal:
        return False
    return count.value > 0


def visible() -> bool:
    """`available`, asked in a process of its own: children that are forked from one that has initialised the driver
    can't use it. Asked once for each value of CUDA_VISIBLE_DEVICES.

    Raises:
        SystemRefusal: there is a driver that gives no answer.
    """
    return _visible(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _visible(_devices: str | None) -> bool:
    try:
        c.CDLL("libcuda.so.1")  # loading it initialises nothing
    except OSError:
        return False
    mend = "see what nvidia-smi says, or hide all devices: CUDA_VISIBLE_DEVICES=''"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, timeout=_ASK_S
        )
    except subprocess.TimeoutExpired as error:
        raise SystemRefusal(f"the CUDA driver gave no answer within {_ASK_S:g} s", mend) from error
    if asked.returncode not in (0, _NO_DEVICE):
        raise SystemRefusal(f"the CUDA driver can't be asked, status {asked.returncode}: {asked.stderr[-2000:]}", mend)
    return asked.returncode == 0


def exports_descriptors(device: int) -> bool:
    """Whether memory of a device can be exported as a file descriptor."""
    number, value = c.c_int(), c.c_int()
    _call("cuDeviceGet", c.byref(number), c.c_int(device))
    _call("cuDeviceGetAttribute", c.byref(value), c.c_int(_POSIX_FD_SUPPORTED), number)
    return bool(value.value)


def compute_capability(device: int) -> tuple[int, int]:
    """Of a device, as (9, 0) for Hopper."""
    number, value = c.c_int(), c.c_int()
    _call("cuDeviceGet", c.byref(number), c.c_int(device))
    found = []
    for attribute in _COMPUTE_CAPABILITY:
        _call("cuDeviceGetAttribute", c.byref(value), c.c_int(attribute), number)
        found.append(value.value)
    return found[0], found[1]


def granularity(device: int) -> int:
    """Sizes of allocations are multiples of this."""
    size = c.c_size_t()
    prop = _prop(device)
    _call("cuMemGetAllocationGranularity", c.byref(size), c.byref(prop), c.c_int(0))
    return size.value


def create(size: int, device: int) -> int:
    """Device memory as a file descriptor; the descriptor alone keeps it. Needs no context."""
    handle, fd = c.c_uint64(), c.c_int()
    prop = _prop(device)
    _call("cuMemCreate", c.byref(handle), c.c_size_t(size), c.byref(prop), c.c_uint64(0))
    try:
        _call("cuMemExportToShareableHandle", c.byref(fd), handle, c.c_int(_POSIX_FD), c.c_uint64(0))
    finally:
        _call("cuMemRelease", handle)
    return fd.value


def use(device: int) -> None:
    """Make the primary context of a device current in this thread (shared with torch and other runtimes)."""
    number, context = c.c_int(), c.c_void_p()
    _call("cuDeviceGet", c.byref(number), c.c_int(device))
    _call("cuDevicePrimaryCtxRetain", c.byref(context), number)
    _call("cuCtxSetCurrent", context)


def map_fd(fd: int, size: int, device: int, write: bool) -> int:
    """Map exported memory into this process; returns its device address. Needs a context."""
    handle, pointer = c.c_uint64(), c.c_uint64()
    _call("cuMemImportFromShareableHandle", c.byref(handle), c.c_void_p(fd), c.c_int(_POSIX_FD))
    try:
        _call("cuMemAddressReserve", c.byref(pointer), c.c_size_t(size), c.c_size_t(0), c.c_uint64(0), c.c_uint64(0))
        _call("cuMemMap", pointer, c.c_size_t(size), c.c_size_t(0), handle, c.c_uint64(0))
    finally:
        _call("cuMemRelease", handle)
    access = _Access()
    access.location.type, access.location.id = _DEVICE, device
    access.flags = READ_WRITE if write else READ
    _call("cuMemSetAccess", pointer, c.c_size_t(size), c.byref(access), c.c_size_t(1))
    return pointer.value


def unmap(pointer: int, size: int) -> None:
    """Undo `map_fd`."""
    _call("cuMemUnmap", c.c_uint64(pointer), c.c_size_t(size))
    _call("cuMemAddressFree", c.c_uint64(pointer), c.c_size_t(size))


def allocate(size: int) -> int:
    """An ordinary allocation in the current context; returns its device address."""
    pointer = c.c_uint64()
    _call("cuMemAlloc_v2", c.byref(pointer), c.c_size_t(size))
    return pointer.value


def free(pointer: int) -> None:
    """Undo `allocate`."""
    _call("cuMemFree_v2", c.c_uint64(pointer))


def ipc_handle(pointer: int) -> bytes:
    """The handle by which other processes open an allocation, `IPC_HANDLE_BYTES` long."""
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", c.byref(handle), c.c_uint64(pointer))
    return bytes(handle.reserved)


def open_ipc(handle: bytes) -> int:
    """Map another process's allocation, for reading and writing; returns its device address in the current context.
    Opening it again gives the same address, and counts."""
    pointer = c.c_uint64()
    by_value = _IpcHandle((c.c_ubyte * IPC_HANDLE_BYTES).from_buffer_copy(handle))
    _call("cuIpcOpenMemHandle_v2", c.byref(pointer), by_value, c.c_uint(_LAZY_PEER_ACCESS))
    return pointer.value


def close_ipc(pointer: int) -> None:
    """Undo one `open_ipc`."""
    _call("cuIpcCloseMemHandle", c.c_uint64(pointer))


def copy_in(device: int, host: int, size: int) -> None:
    """Copy bytes of this process to the device; done when it returns."""
    _call("cuMemcpyHtoD_v2", c.c_uint64(device), c.c_void_p(host), c.c_size_t(size))


def copy_out(host: int, device: int, size: int) -> None:
    """Copy bytes of the device into this process; done when it returns."""
    _call("cuMemcpyDtoH_v2", c.c_void_p(host), c.c_uint64(device), c.c_size_t(size))


def finish(device: int) -> None:
    """Until the device has done all that this process asked of it."""
    use(device)
    _call("cuCtxSynchronize")


def register_host(address: int, size: int) -> int:
    """`cuMemHostRegister` of memory of this process: the hook of `Arena.pin_for_cuda`. Returns the driver's code."""
    return int(_driver().cuMemHostRegister_v2(c.c_void_p(address), c.c_size_t(size), c.c_uint(1)))


def unregister_host(address: int) -> None:
    """Undo `register_host`; before the memory is unmapped."""
    _call("cuMemHostUnregister", c.c_void_p(address))


class Stream:
    """A stream of copies between pinned host memory and the device."""

    def __init__(self) -> None:
        self._stream = c.c_void_p()
        _call("cuStreamCreate", c.byref(self._stream), c.c_uint(1))

    def to_host(self, host: int, device: int, size: int) -> None:
        _call("cuMemcpyDtoHAsync_v2", c.c_void_p(host), c.c_uint64(device), c.c_size_t(size), self._stream)

    def to_device(self, device: int, host: int, size: int) -> None:
        _call("cuMemcpyHtoDAsync_v2", c.c_uint64(device), c.c_void_p(host), c.c_size_t(size), self._stream)

    def pieces(self, host: int, device: int, stride: int, piece: int, count: int, to_host: bool) -> None:
        """Copy `count` pieces that lie `stride` bytes apart on the device and side by side on the host."""
        if count == 1 or stride > MAX_PITCH:
            for i in range(count):
                if to_host:
                    self.to_host(host + i * piece, device + i * stride, piece)
                else:
                    self.to_device(device + i * stride, host + i * piece, piece)
            return
        copy = _Copy2D(width=piece, height=count)
        copy.src_type, copy.dst_type = (_ON_DEVICE, _HOST) if to_host else (_HOST, _ON_DEVICE)
        if to_host:
            copy.src_device, copy.src_pitch, copy.dst_host, copy.dst_pitch = device, stride, host, piece
        else:
            copy.src_host, copy.src_pitch, copy.dst_device, copy.dst_pitch = host, piece, device, stride
        _call("cuMemcpy2DAsync_v2", c.byref(copy), self._stream)

    def wait(self) -> None:
        """Until all copies so far are done."""
        _call("cuStreamSynchronize", self._stream)
