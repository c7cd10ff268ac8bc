"""A CUDA driver made of host memory, so that arenas on a device run through real processes on any machine.

`device_of_host_memory.py serve CONFIG --ready-fd N` is a memory manager on it, `… owner FD DEVICE` its owner process,
`… role SOCKET [hold]` a role that gets two tensors on device 0 and says what happened as JSON lines; then `pss`,
`write`, `open`, `host` on stdin ask for more. `… pool SOCKET [read]` is a role that maps the L1 of pool `kv`: `put`,
`get`; `… mover SOCKET` the mover between its L1 and its L2. Device memory is memory files, mapped as asked; what is
shared by CUDA IPC is opened through its owner.

STAND_IN_EXPORTS in the environment: `no`, the device says that it can't export descriptors; `fails`, it says it can and
can't; `nothing`, it can't share memory by CUDA IPC either. STAND_IN_ANSWER_S: `cuda_owner.ANSWER_S`.
"""

import ctypes
import json
import mmap
import os
import struct
import sys

import numpy as np

from omni_flow.data import cuda, cuda_mover, cuda_owner, launch
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import DataError, SystemRefusal
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.messages import arena_name
from omni_flow.data.weights.names import Family, TensorSpec, WeightName

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAMILY = Family("demo/model", "r1")
SPECS = [
    TensorSpec(WeightName(family=FAMILY, path="big", dtype="u8"), (8 << 20,)),
    TensorSpec(WeightName(family=FAMILY, path="odd", dtype="i16"), (7, 33)),
]


EXPORTS = os.environ.get("STAND_IN_EXPORTS", "yes")
allocated = {}
opened = {}


def use(device):
    if device:
        raise SystemRefusal(f"no device {device}", "there is device 0")


def exports_descriptors(device):
    use(device)
    return EXPORTS not in ("no", "nothing")


def create(size, device):
    use(device)
    if EXPORTS != "yes":
        raise SystemRefusal("cuMemCreate: CUDA_ERROR_NOT_SUPPORTED (801)")
    return memory(size)


def memory(size):
    fd = os.memfd_create("stand-in-device", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def map_fd(fd, size, device, write):
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    address = LIBC.mmap(None, size, prot, mmap.MAP_SHARED, fd, 0)
    assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return address


def allocate(size):
    fd = memory(size)
    address = map_fd(fd, size, 0, True)
    allocated[address] = (fd, size)
    return address


def free(address):
    fd, size = allocated.pop(address)
    LIBC.munmap(address, size)
    os.close(fd)


def ipc_handle(address):
    if EXPORTS == "nothing":
        raise SystemRefusal("cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED (801)")
    return struct.pack("<QQQ40x", os.getpid(), *allocated[address])


def open_ipc(handle):
    pid, owned, size, *_ = struct.unpack("<QQQ40x", handle)
    address, count = opened.get(handle, (0, 0))
    if not count:
        fd = os.open(f"/proc/{pid}/fd/{owned}", os.O_RDWR)
        address = map_fd(fd, size, 0, True)
        os.close(fd)
    opened[handle] = (address, count + 1)
    return address


def close_ipc(address):
    handle, count = next((handle, count) for handle, (at, count) in opened.items() if at == address)
    opened[handle] = (address, count - 1)
    if count == 1:
        LIBC.munmap(address, struct.unpack("<QQQ40x", handle)[2])


class Stream:
    """Copies at once."""

    def pieces(self, host, device, stride, piece, count, to_host):
        for i in range(count):
            there, here = device + i * stride, host + i * piece
            ctypes.memmove(*((here, there) if to_host else (there, here)), piece)

    def wait(self):
        pass


cuda.Stream = Stream
cuda.exports_descriptors = exports_descriptors
cuda.allocate, cuda.free = allocate, free
cuda.ipc_handle, cuda.open_ipc, cuda.close_ipc = ipc_handle, open_ipc, close_ipc
cuda_owner.ANSWER_S = float(os.environ.get("STAND_IN_ANSWER_S", cuda_owner.ANSWER_S))
cuda_owner.COMMAND = (sys.executable, __file__, "owner")
cuda.granularity = lambda device: 2 << 20
cuda.use = cuda.finish = use
cuda.create = create
cuda.map_fd = map_fd
cuda.unmap = LIBC.munmap
cuda.copy_in = cuda.copy_out = ctypes.memmove
cuda.register_host = lambda address, size: 0
cuda.unregister_host = lambda address: None


def expected(spec):
    return np.random.default_rng(len(spec.name.path) + spec.nbytes).integers(0, 256, spec.nbytes, np.uint8)


def say(**what):
    print(json.dumps(what), flush=True)


def pss():
    total, ours = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                ours = "stand-in-device" in line
            elif ours and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def role(path, hold):
    def load(spec, out):
        if hold:
            say(loading=True)
            sys.stdin.readline()
        np.frombuffer(out, np.uint8)[:] = expected(spec)

    with MemoryManagerClient(path, name="role") as client:
        weights = WeightClient(client)
        found = weights.get(SPECS, load, device=0, timeout_s=60)
        right = all(bytes(found.bytes(spec.name)) == expected(spec).tobytes() for spec in SPECS)
        say(loaded=len(found.loaded), right=right, rotten=len(found.verify()))
        entry = found.entry(SPECS[0].name)
        for line in sys.stdin:
            match line.strip():
                case "pss":
                    for arena in found._arenas.values():
                        arena.read(0, arena.size)
                    arena = None
                    say(pss=pss())
                case "write":
                    ctypes.memset(next(iter(found._arenas.values())).device_ptr, 1, 1)
                case "open":
                    try:
                        client.descriptor(arena_name(entry.segment), write=True)
                    except DataError as error:
                        say(error=error.code)
                case "host":
                    with weights.get(SPECS, load) as here:
                        say(loaded=len(here.loaded), entries=[e.device for e in weights.manifest(FAMILY)])
                case "elsewhere":
                    try:
                        weights.get(SPECS, load, device=3)
                    except DataError as error:
                        say(error=error.code)
                case "release":
                    found.release()
                    say(pss=pss())


def pool(path, read):
    with MemoryManagerClient(path, name="role", read_only=read) as client:
        arena = client.device_arena("kv/l1", write=not read)
        say(kind=arena.kind, enforced=arena.readonly_enforced, size=arena.size)
        for line in sys.stdin:
            match line.split():
                case ["put", value]:
                    arena.write(0, np.full(64, int(value), np.uint8))
                    say(put=int(value))
                case ["get"]:
                    say(got=sorted(set(arena.read(0, 64).tolist())))
                case ["close"]:
                    arena.unmap()
                    say(mapped=arena.device_ptr)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        launch.main(sys.argv[2:])
    elif sys.argv[1] == "owner":
        cuda_owner.main(sys.argv[1:])
    elif sys.argv[1] == "mover":
        cuda_mover.main(sys.argv[1:])
    elif sys.argv[1] == "pool":
        pool(sys.argv[2], "read" in sys.argv[3:])
    else:
        role(sys.argv[2], "hold" in sys.argv[3:])
