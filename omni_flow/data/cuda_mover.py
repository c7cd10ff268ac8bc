"""The mover between L1 on a GPU and L2 in pinned CPU memory. `python -m omni_flow.data.cuda_mover PATH`.

A page is one piece in L2 and `planes` pieces in L1 (layer-major: one per layer, or per layer's keys and values).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omni_flow.data import cuda
from omni_flow.data.device_arena import DeviceArena
from omni_flow.data.messages import L1, L2, Job, PoolInfo
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


class CudaCopyHandler:
    """Copies pages on a stream of its own; a job is reported when the stream has passed it."""

    def start(self, link: MoverLink) -> None:
        self._link = link
        self._pools: dict[str, Geometry] = {}
        for info in link.client.welcome.pools:
            if info.l1_device >= 0 and info.l2_pages:
                self._pools[info.name] = self._map(info)
        self._stream = cuda.Stream()

    def _map(self, info: PoolInfo) -> Geometry:
        device = self._link.client.device_arena(f"{info.name}/l1", write=True)
        host = self._link.arena(info.name, L2)
        host.pin_for_cuda(cuda.register_host)
        stride = info.l1_pages * (info.page_bytes // info.planes)
        return Geometry(info.page_bytes, info.planes, stride, device.device_ptr, host.address, device)

    def run(self, job: Job, columns: Columns) -> None:
        pool = self._pools[job.pool]
        piece = pool.page_bytes // pool.planes
        down = job.src == L1
        on_device, on_host = (columns[1], columns[2]) if down else (columns[2], columns[1])
        for page, slot in zip(on_device.tolist(), on_host.tolist(), strict=True):
            self._stream.pieces(
                pool.host + slot * pool.page_bytes,
                pool.device + page * piece,
                pool.stride,
                piece,
                pool.planes,
                to_host=down,
            )
        self._stream.wait()
        self._link.done(job, np.ones(len(columns[1]), np.uint8))

    def close(self) -> None:
        """Take the pinning back; for a process that goes on afterwards."""
        for pool in self._pools.values():
            cuda.unregister_host(pool.host)

    def cancel(self, job_id: int) -> None:
        """Jobs are run one by one: a job that has begun ends by itself."""


def main(argv: Sequence[str]) -> None:
    """The path of the manager's socket is the argument."""
    run_mover(argv[1], "CUDA copy mover", ("cuda-copy",), CudaCopyHandler())


if __name__ == "__main__":
    main(sys.argv)
