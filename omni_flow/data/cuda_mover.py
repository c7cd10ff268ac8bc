"""The mover between L1 on a GPU and L2 in pinned CPU memory. `python -m omni_flow.data.cuda_mover PATH`.

A page is one piece in L2 and `planes` pieces in L1 (layer-major: one per layer, or per layer's keys and values).
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from omni_flow.data import cuda
from omni_flow.data.device_arena import DeviceArena
from omni_flow.data.errors import run_process
from omni_flow.data.messages import L1, L2, TIER_NAMES, Job, PoolInfo
from omni_flow.data.mover import Columns, MoverLink, run_mover


@dataclass(slots=True)
class Geometry:
    """Where the pages of a pool lie."""

    page_bytes: int
    planes: int
    stride: int
    device: int
    host: int
    arena: DeviceArena


class _Lane:
    """Executes the jobs of one direction: the device copies both ways at once. While the copies of one job run, those
    of the next are handed to the device, so there are two threads.

    Args:
        copy: executes a job on a stream; returns when the device has done it.
    """

    def __init__(self, name: str, link: MoverLink, copy: Callable[[Job, Columns, cuda.Stream], None]) -> None:
        self._link = link
        self._copy = copy
        self._jobs: queue.SimpleQueue[tuple[Job, Columns, int] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name} {i}", daemon=True) for i in range(2)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job, columns: Columns, device: int) -> None:
        """Execute a job whose L1 is on `device`."""
        self._jobs.put((job, columns, device))

    def end(self) -> None:
        """After the jobs that were put."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        streams: dict[int, cuda.Stream] = {}
        try:
            while (order := self._jobs.get()) is not None:
                job, columns, device = order
                cuda.use(device)
                if device not in streams:
                    streams[device] = cuda.Stream()
                self._copy(job, columns, streams[device])
                self._link.done(job, np.ones(len(columns[1]), np.uint8))
        except BaseException as error:
            self._link.later(functools.partial(_raise, error))


def _raise(error: BaseException) -> None:
    raise error


class CudaCopyHandler:
    """Copies pages on streams; a job is reported when its stream has passed it."""

    def start(self, link: MoverLink) -> None:
        self._link = link
        self._pools: dict[str, Geometry] = {}
        for info in link.client.welcome.pools:
            if info.l1_device >= 0 and info.l2_pages:
                self._pools[info.name] = self._map(info)
        self._lanes = {tier: _Lane(f"from {TIER_NAMES[tier]}", link, self._copy) for tier in (L1, L2)}

    def _map(self, info: PoolInfo) -> Geometry:
        device = self._link.client.device_arena(f"{info.name}/l1", write=True)
        host = self._link.arena(info.name, L2)
        host.pin_for_cuda(cuda.register_host)
        stride = info.l1_pages * (info.page_bytes // info.planes)
        return Geometry(info.page_bytes, info.planes, stride, device.device_ptr, host.address, device)

    def run(self, job: Job, columns: Columns) -> None:
        self._lanes[job.src].put(job, columns, self._pools[job.pool].arena.device)

    def _copy(self, job: Job, columns: Columns, stream: cuda.Stream) -> None:
        pool = self._pools[job.pool]
        piece = pool.page_bytes // pool.planes
        down = job.src == L1
        on_device, on_host = (columns[1], columns[2]) if down else (columns[2], columns[1])
        for page, slot in zip(on_device.tolist(), on_host.tolist(), strict=True):
            stream.pieces(
                pool.host + slot * pool.page_bytes,
                pool.device + page * piece,
                pool.stride,
                piece,
                pool.planes,
                to_host=down,
            )
        stream.wait()

    def close(self) -> None:
        """End the lanes and take the pinning back; for a process that goes on afterwards."""
        for lane in self._lanes.values():
            lane.end()
        for pool in self._pools.values():
            cuda.unregister_host(pool.host)

    def cancel(self, job_id: int) -> None:
        """A job that has begun ends by itself, and one that waits will not wait long."""


def main(argv: Sequence[str]) -> None:
    """The path of the manager's socket is the argument."""
    run_mover(argv[1], "CUDA copy mover", ("cuda-copy",), CudaCopyHandler())


if __name__ == "__main__":
    run_process(lambda: main(sys.argv))
