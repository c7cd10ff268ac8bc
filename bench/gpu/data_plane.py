"""The data plane on a GPU: `python bench/gpu/data_plane.py [--json]`. Needs one NVIDIA GPU and torch.

L1 ↔ L2 of 2 MiB pages through the CUDA mover over pinned `cudaMemcpyAsync` of the same bytes, interleaved; the same
with layer-major pages of 27 pieces; hand-over of device pages between two processes without a copy, checked byte by
byte; what a memory manager with a device arena costs the device; that a read-only mapping cannot be written; what a
second process that maps the same weights costs the device beyond its CUDA context (`weights_second_process_mib`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch

from omni_flow.data import cuda
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.launch import start
from omni_flow.data.messages import L1, L2
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.data.server_config import ServerConfig

PAGE = 2 << 20
PAGES = 512
PLANES = 27
PLANE_PIECE = 72 << 10
TAKE = 128

READER = """
import sys, torch, time
import numpy as np
from omni_flow.data.client import MemoryManagerClient
client = MemoryManagerClient(sys.argv[1], name="reader", read_only=True)
keys = np.frombuffer(bytes.fromhex(sys.argv[2]), np.uint8).reshape(-1, 32)
began = time.perf_counter()
arena = client.device_arena("kv/l1")
mapped = time.perf_counter() - began
page = int(sys.argv[3])
found = client.lookup("kv", keys)
ok = all(bool((arena.torch(int(s) * page, (page,), torch.uint8) == int(k[0])).all()) for s, k in zip(found.slots, keys))
print(found.pages, int(ok), mapped * 1e3)
try:
    arena.torch(0, (page,), torch.uint8).fill_(1)
    torch.cuda.synchronize()
    print("written")
except Exception as error:
    print("refused")
"""

WEIGHTS_MIB = 1024
WEIGHTS_READER = """
import sys, time, torch
import numpy as np
from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.weights.client import WeightClient
from omni_flow.data.weights.names import Family, TensorSpec, WeightName
family = Family("bench", "0")
names = [WeightName(family=family, path=str(i), dtype="u8") for i in range(int(sys.argv[2]) // 64)]
specs = [TensorSpec(name, (64 << 20,)) for name in names]
def load(spec, out):
    np.frombuffer(out, np.uint8)[:] = int(spec.name.path) + 1
client = MemoryManagerClient(sys.argv[1], name="engine")
torch.zeros(1, device="cuda")
def same(tensor, value):
    return bool(tensor[:: 1 << 20].eq(value).all().item())
same(torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"), 0)  # so that its kernels are not counted below
torch.cuda.empty_cache()
print("context", flush=True)
sys.stdin.readline()
began = time.perf_counter()
weights = WeightClient(client).get(specs, load, device=0)
seconds = time.perf_counter() - began
ok = all(same(weights.torch(s.name), int(s.name.path) + 1) for s in specs) and not weights.verify()
torch.cuda.empty_cache()
print(len(weights.loaded), int(ok), seconds, flush=True)
sys.stdin.readline()
try:
    weights.torch(specs[0].name).fill_(7)
    torch.cuda.synchronize()
    print("written")
except Exception:
    print("refused")
"""


def device_used() -> float:
    """MiB used on the device, all processes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / (1 << 20)


@contextlib.contextmanager
def manager(spec: PoolSpec) -> Iterator[str]:
    """A memory manager with a CUDA copy mover."""
    with tempfile.TemporaryDirectory(prefix="omni-bench") as folder:
        config = ServerConfig(path=f"{folder}/m.sock", pools=(spec,), movers=(("cuda-copy",),))
        process = start(config, log=f"{folder}/log")
        try:
            with MemoryManagerClient(config.path, role="viewer") as client:
                while not client.stats()["job_movers"]:
                    if client.wait_end(0.05):
                        break
            yield config.path
        except BaseException:
            with open(f"{folder}/log", encoding="utf-8") as log:
                print(log.read(), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()


def pinned_seconds(host: torch.Tensor, device: torch.Tensor, down: bool) -> float:
    """One pinned copy of the same bytes."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    (host if down else device).copy_(device if down else host, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def migration(samples: dict[str, list[float]], planes: int, page: int, tag: str) -> None:
    """Demote and promote batches; the mover's copy alone, then as a fetch seen by a client."""
    from omni_flow.data.cuda_mover import CudaCopyHandler
    from omni_flow.data.messages import Job
    from omni_flow.data.mover import MoverLink

    spec = PoolSpec(name="kv", page_bytes=page, l1_pages=PAGES, l2_pages=PAGES, l1_device=0, planes=planes)
    with manager(spec) as path, MemoryManagerClient(path) as client:
        arena = client.device_arena("kv/l1", write=True)
        whole = arena.torch(0, (PAGES * page,), torch.uint8)
        whole.copy_(torch.arange(PAGES * page, dtype=torch.int64, device="cuda") % 251)
        handler, link, ended = CudaCopyHandler(), MoverLink(MemoryManagerClient(path)), threading.Event()
        link.done = lambda *_: ended.set()  # type: ignore[method-assign]
        handler.start(link)
        host = torch.empty(TAKE * page, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(TAKE * page, dtype=torch.uint8, device="cuda")
        rng = np.random.default_rng(1)
        for _ in range(20):
            slots = rng.permutation(PAGES)[:TAKE].astype(np.uint32)
            others = rng.permutation(PAGES)[:TAKE].astype(np.uint32)
            for down in (True, False):
                job = Job(1, "copy", "kv", page, 1000, L1 if down else L2, L2 if down else L1)
                columns = (slots, slots if down else others, others if down else slots)
                began = time.perf_counter()
                ended.clear()
                handler.run(job, columns)
                ended.wait()
                ours = time.perf_counter() - began
                plain = pinned_seconds(host, device, down)
                name = f"{'l1_l2' if down else 'l2_l1'}{tag}"
                samples.setdefault(f"{name}_ratio", []).append(plain / ours)
                samples.setdefault(f"{name}_gb_per_s", []).append(TAKE * page / ours / 1e9)
        handler.close()
        expected = torch.arange(PAGES * page, dtype=torch.int64, device="cuda") % 251
        assert bool((whole == expected).all()), "round trips changed bytes"


def hand_over(samples: dict[str, list[float]]) -> None:
    """Pages written on the device here, read on the device by another process."""
    before = device_used()
    spec = PoolSpec(name="kv", page_bytes=PAGE, l1_pages=PAGES, l1_device=0)
    with tempfile.TemporaryDirectory(prefix="omni-bench") as folder:
        process = start(ServerConfig(path=f"{folder}/m.sock", pools=(spec,)))
        samples["manager_mib_beyond_arena"] = [device_used() - before - PAGES * PAGE / (1 << 20)]
        try:
            with MemoryManagerClient(f"{folder}/m.sock") as client:
                arena = client.device_arena("kv/l1", write=True)
                keys = np.frombuffer(os.urandom(32 * 16), np.uint8).reshape(16, 32)
                room = client.reserve("kv", 16)
                for slot, key in zip(room.slots, keys, strict=True):
                    arena.torch(int(slot) * PAGE, (PAGE,), torch.uint8).fill_(int(key[0]))
                torch.cuda.synchronize()
                client.commit("kv", room.token, keys)
                command = [sys.executable, "-c", READER, f"{folder}/m.sock", keys.tobytes().hex(), str(PAGE)]
                answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
                lines = answer.stdout.split("\n")
                assert lines[0].startswith("16 1 "), answer
                samples["map_ms"] = [float(lines[0].split()[2])]
                samples["reader_refused_to_write"] = [float("written" not in answer.stdout)]
                untouched = arena.torch(int(room.slots[0]) * PAGE, (PAGE,), torch.uint8)
                assert bool((untouched == int(keys[0][0])).all())
                del untouched
                arena.unmap()
        finally:
            process.terminate()
            process.wait()
    samples["arena_mib_left_after_the_end"] = [device_used() - before]


def shared_weights(samples: dict[str, list[float]]) -> None:
    """Two engines with the same weights: device memory before and after each maps them, its context counted apart."""
    with tempfile.TemporaryDirectory(prefix="omni-bench") as folder:
        before = device_used()
        server = start(ServerConfig(path=f"{folder}/m.sock"))
        engines: list[subprocess.Popen[str]] = []
        try:
            for name in ("first", "second"):
                command = [sys.executable, "-c", WEIGHTS_READER, f"{folder}/m.sock", str(WEIGHTS_MIB)]
                engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                engines.append(engine)
                assert engine.stdin is not None
                assert engine.stdout is not None
                assert engine.stdout.readline() == "context\n"
                alone = device_used()
                engine.stdin.write("go\n")
                engine.stdin.flush()
                loaded, right, seconds = engine.stdout.readline().split()
                assert right == "1", f"{name} read wrong weights"
                assert (loaded == "0") == (name == "second")
                samples[f"weights_{name}_process_mib"] = [device_used() - alone]
                samples[f"weights_{name}_process_s"] = [float(seconds)]
            answers = [engine.communicate("write\n", timeout=60)[0].strip() for engine in engines]
            samples["weights_written_by_a_reader"] = [float("written" in answers)]
            samples["weights_mib_held_without_engines"] = [device_used() - before]
        finally:
            for engine in engines:
                engine.kill()
                engine.wait()
            server.terminate()
            server.wait()
        samples["weights_mib_left_after_the_end"] = [device_used() - before]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object of medians on stdout and nothing else")
    options = parser.parse_args()
    if not cuda.available():
        sys.exit("no CUDA device")
    torch.zeros(1, device="cuda")
    samples: dict[str, list[float]] = {}
    hand_over(samples)
    shared_weights(samples)
    migration(samples, 1, PAGE, "")
    migration(samples, PLANES, PLANES * PLANE_PIECE, "_27_pieces")
    if options.json:
        print(json.dumps({key: round(statistics.median(values), 4) for key, values in samples.items()}))
        return
    print(f"{torch.cuda.get_device_name()}, {platform.platform()}, torch {torch.__version__}")
    for key, values in samples.items():
        print(f"{key:32} {statistics.median(values):10.3f}  {min(values):10.3f} … {max(values):10.3f}  n={len(values)}")


if __name__ == "__main__":
    main()
