"""What the engine's scheduler thread costs beside the model: `python bench/compute_host.py [--json] [--rounds N]`.

SGLang's scheduler as plain SGLang runs it and as an engine of ours runs it, each in a process of its own, on a CPU,
with the model's forward replaced by a tensor of logits: what is left is the host's work, which a GPU waits for. The
pool is full of idle pages, as it is in an engine that has run for a while, so every batch evicts. Plain SGLang has
pages of one token, the only size its 0.5.17 runs without Triton; ours has 64, of a memory manager's pool.

prefill_us_N      from N messages of 512 tokens each to their first tokens, per batch; plain_prefill_us_N: plain SGLang
decode_us_N       a decode step of N rows, mean over the 64 steps to the end of all; plain_decode_us_N: plain SGLang
prefill_added_us_N, decode_added_us_N    the difference
prefill_waits_N, decode_waits_N          messages of the manager that the thread waited for, per batch and per step

Times are processor time of the scheduler's thread (a wait for the manager costs none: hence the waits), and the least
of all rounds, which the two run in turn: other work on the machine only adds. Waits are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine

PROMPT, PAGE, NEW, CHUNK = 512, 64, 64, 8192
QUOTA = 1024 * PAGE
SIZES = (16, 64)
ARGUMENTS: dict[str, Any] = {"context_length": 4096}


class Driver:
    """One scheduler, driven turn by turn as its event loop would.

    Args:
        send: hands over requests (number, ids, new tokens).
        drain: takes what the scheduler has sent.
    """

    def __init__(
        self, scheduler: Any, send: Callable[[list[tuple[int, list[int], int]]], None], drain: Callable[[], None]
    ) -> None:
        self.scheduler, self._send, self._drain = scheduler, send, drain
        self._random = random.Random(1)
        self._number = 0
        _without_model(scheduler.tp_worker.model_runner)

    def run(self, count: int, new: int) -> list[float]:
        """Seconds of each turn of a batch of fresh prompts, the first with their arrival."""
        requests = []
        for _ in range(count):
            self._number += 1
            requests.append((self._number, [self._random.randrange(256) for _ in range(PROMPT)], new))
        self._send(requests)
        turns: list[float] = []
        while True:
            began = time.thread_time()
            busy = self._turn()
            turns.append(time.thread_time() - began)
            self._drain()
            if not busy:
                return turns[:-1]

    def _turn(self) -> bool:
        """One turn of `Scheduler.event_loop_normal`; whether there was something to run."""
        scheduler = self.scheduler
        scheduler.process_input_requests(scheduler.request_receiver.recv_requests())
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return batch is not None


def _without_model(runner: Any) -> None:
    """Every forward gives the same logits."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    logits = torch.zeros(max(SIZES), 64)

    def forward(batch: Any, *_: Any, **__: Any) -> Any:
        return ModelRunnerOutput(LogitsProcessorOutput(logits[: batch.batch_size]), can_run_graph=False)

    runner.forward = forward


def _ours(folder: str, manager: str) -> Driver:
    import numpy as np

    from omni_flow.compute.sampling import Sampling
    from omni_flow.compute.sglang.config import EngineConfig
    from omni_flow.compute.sglang.wire import Generate, Inlet, frame
    from omni_flow.compute.sglang.worker import start

    config = EngineConfig(
        model=folder, device="cpu", max_tokens=QUOTA, page_size=PAGE, max_running=64, chunk=CHUNK, manager=manager,
        pool="kv", extra=ARGUMENTS,
    )  # fmt: skip
    mine, theirs = socket.socketpair()
    for end in (mine, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    scheduler = start(config, Inlet(theirs))

    def send(requests: list[tuple[int, list[int], int]]) -> None:
        mine.sendall(
            b"".join(
                frame(Generate(
                    number, np.asarray(ids, np.int64).tobytes(), [], Sampling(max_tokens=new, ignore_eos=True), b"",
                    False, False, False, 0,
                ))
                for number, ids, new in requests
            )
        )  # fmt: skip

    def drain() -> None:
        try:
            while mine.recv(1 << 20, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            pass

    return Driver(scheduler, send, drain)


def _plain(folder: str) -> Driver:
    """Plain SGLang's scheduler with its own cache, allocator, sampler and sockets; of ours only what a CPU needs."""
    from omni_flow.compute.sglang import cpu_fixes
    from omni_flow.compute.sglang.shim import prepare_cpu

    prepare_cpu()
    os.environ["SGLANG_PLUGINS"] = "none"
    import zmq
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput, sock_send
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import publish
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import PortArgs, ServerArgs

    def allocator(size: int, page_size: int, **more: Any) -> Any:
        return TokenToKVPoolAllocator(size, **more)

    current_platform.get_paged_allocator_cls = lambda: allocator
    for target, kind, function in cpu_fixes.hooks():
        HookRegistry.register(target, function, HookType[kind])
    load_plugins()
    cpu_fixes.register()
    arguments = ServerArgs(
        model_path=folder, device="cpu", dtype="float32", skip_tokenizer_init=True, grammar_backend="none",
        sampling_backend="pytorch", schedule_policy="fcfs", max_total_tokens=QUOTA, max_running_requests=64,
        page_size=1, chunked_prefill_size=CHUNK, disable_overlap_schedule=True, stream_interval=1, log_level="warning",
        attention_backend="torch_native", disable_cuda_graph=True, **ARGUMENTS,
    )  # fmt: skip
    _set_envs_and_config(arguments)
    publish(arguments, role="scheduler")
    ports = PortArgs.init_new(arguments)
    context = zmq.Context()
    requests_out, results_in = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    requests_out.bind(ports.scheduler_input_ipc_name)
    results_in.bind(ports.tokenizer_ipc_name)
    scheduler = Scheduler(arguments, ports, 0, 0, 0, 0, 0, 0, None)

    def send(requests: list[tuple[int, list[int], int]]) -> None:
        for number, ids, new in requests:
            sampling = SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
            sampling.normalize(None)
            sock_send(requests_out, TokenizedGenerateReqInput(
                rid=f"{number:016x}", input_text=None, input_ids=array("q", ids), input_embeds=None, mm_inputs=None,
                token_type_ids=None, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
                sampling_params=sampling, token_ids_logprob=None, stream=True,
            ))  # fmt: skip
        time.sleep(0.05)  # until ZeroMQ's thread has brought them all: they are to form one batch

    def drain() -> None:
        while results_in.poll(0):
            results_in.recv()

    return Driver(scheduler, send, drain)


def _count_waits() -> Callable[[], int]:
    """How often a client has waited for the memory manager in this process."""
    from omni_flow.data.link import UnixLink

    count = [0]
    receive = UnixLink.receive

    def counted(link: UnixLink, timeout: float | None, fds: bool = True) -> Any:
        count[0] += timeout is None or timeout > 0
        return receive(link, timeout, fds)

    UnixLink.receive = counted  # type: ignore[method-assign,assignment]
    return lambda: count[0]


def child(kind: str, folder: str, manager: str) -> None:
    """Serve rounds: for each line of standard input (a batch size) one line with that round's figures."""
    waits = _count_waits()
    driver = _ours(folder, manager) if kind == "ours" else _plain(folder)
    while driver.scheduler.token_to_kv_pool_allocator.available_size() > PAGE * 128:
        driver.run(64, 1)
    driver.run(16, NEW + 1)
    print("up", flush=True)
    for line in sys.stdin:
        size = int(line)
        before = waits()
        prefill = sum(driver.run(size, 1)) * 1e6
        first = waits() - before
        turns = driver.run(size, NEW + 1)[-(-size * PROMPT // CHUNK) :]
        figures = {"prefill_us": prefill, "decode_us": sum(turns) / NEW * 1e6}
        if kind == "ours":
            figures |= {"prefill_waits": first, "decode_waits": (waits() - before - 2 * first) / NEW}
        print(json.dumps(figures), flush=True)


class Child:
    """One of the two schedulers in its process."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", kind, "--folder", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"),
        )  # fmt: skip
        self._answer("up")

    def _answer(self, begin: str) -> str:
        """The next line that begins so; SGLang prints others."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begin):
                return line
        raise RuntimeError(f"a scheduler ended with {self._process.wait()}")

    def round(self, size: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{size}\n")
        self._process.stdin.flush()
        figures: dict[str, float] = json.loads(self._answer("{"))
        return figures

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(rounds: int, folder: Path) -> dict[str, float]:
    """Rounds of both schedulers in turn."""
    from omni_flow.compute.kv_layout import kv_layout
    from omni_flow.data.launch import start
    from omni_flow.data.pool_spec import PoolSpec
    from omni_flow.data.server_config import ServerConfig
    from omni_flow.testing import tiny_checkpoint

    checkpoint = tiny_checkpoint("deepseek_v2", folder / "model")
    (checkpoint / "tokenizer.json").unlink()  # neither looks for stop strings
    page_bytes = kv_layout(json.loads((checkpoint / "config.json").read_text())).page_bytes(PAGE, "float32")
    pool = PoolSpec(name="kv", page_bytes=page_bytes, l1_pages=QUOTA // PAGE + 129, padding=1)
    manager = start(ServerConfig(path=str(folder / "memory.sock"), pools=(pool,), huge=False))
    samples: dict[str, list[float]] = {}
    try:
        plain, ours = Child("plain", folder), Child("ours", folder)
        for size in SIZES:
            for _ in range(rounds):
                theirs, mine = plain.round(size), ours.round(size)
                for name, value in mine.items():
                    samples.setdefault(f"{name}_{size}", []).append(value)
                for name, value in theirs.items():
                    samples.setdefault(f"plain_{name}_{size}", []).append(value)
        plain.close()
        ours.close()
    finally:
        manager.terminate()
        manager.wait(20)
    figures = {name: (min if "_us_" in name else statistics.median)(values) for name, values in samples.items()}
    for size in SIZES:
        for phase in ("prefill", "decode"):
            name = f"{phase}_us_{size}"
            figures[f"{phase}_added_us_{size}"] = figures[name] - figures[f"plain_{name}"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child", choices=("ours", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder = Path(options.folder)
        child(options.child, str(folder / "model"), str(folder / "memory.sock"))
        os._exit(0)
    with tempfile.TemporaryDirectory() as work:
        figures = measure(options.rounds, Path(work))
    if options.json:
        print(json.dumps(figures))
        return
    print(machine.described())
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}")


if __name__ == "__main__":
    main()
