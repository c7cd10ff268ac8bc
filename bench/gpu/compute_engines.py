"""What `compute.py` measures: plain SGLang in a process of its own, engines of ours, and the limits of the tiers."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PAGE, CONTEXT = 64, 40_960
IDLE_S = 0.01
QUOTA = 2048 * PAGE


def device_rate() -> float:
    """Bytes a second of a pinned copy to the device."""
    import torch

    nbytes = 256 << 20
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return nbytes / statistics.median(times)


def disk_rate(folder: Path) -> float:
    """Bytes a second that four threads read of a file in `folder`, past the page cache."""
    piece, count = 2 << 20, 128
    path = folder / "raw"
    path.write_bytes(os.urandom(piece) * count)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(at: int) -> None:
        os.preadv(fd, [mmap.mmap(-1, piece)], at * piece)

    times = []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(read, range(count)))
            times.append(time.perf_counter() - began)
    os.close(fd)
    path.unlink()
    return piece * count / statistics.median(times)


async def device_idle() -> None:
    """Until the device has nothing to do. A scheduler with overlap launches a decode step before it knows that a
    request ends with the token before: that step would run in the time of the next request, of whichever engine, and
    the more so the sooner that comes."""
    await asyncio.sleep(IDLE_S)


# -- plain SGLang, in a process of its own ----------------------------------------------------------------------------


def _plain(pipe: Any, folder: str, flags: dict[str, Any]) -> None:
    os.setpgid(0, 0)  # with its scheduler and detokenizer, to be stopped as one
    import sglang

    engine = sglang.Engine(
        model_path=folder, load_format="dummy", skip_tokenizer_init=True, sampling_backend="pytorch",
        grammar_backend="none", moe_runner_backend="triton", page_size=PAGE, log_level="warning",
        context_length=CONTEXT, max_running_requests=64, max_total_tokens=QUOTA, dtype="bfloat16", **flags,
    )  # fmt: skip
    pipe.send("up")
    while (asked := pipe.recv()) is not None:
        ids, count = asked
        began = time.perf_counter()
        made = engine.generate(
            input_ids=ids, sampling_params={"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        )
        pipe.send((time.perf_counter() - began, [one["output_ids"] for one in made]))
    engine.shutdown()


class Plain:
    """Blocking calls to the plain engine; its times are taken in its own process."""

    def __init__(self, folder: str, flags: dict[str, Any]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_plain, args=(theirs, folder, flags))
        self._process.start()
        theirs.close()

    async def start(self) -> None:
        """Until it serves."""
        assert await asyncio.get_running_loop().run_in_executor(None, self._pipe.recv) == "up"

    def __call__(self, ids: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        self._pipe.send((ids, count))
        seconds, tokens = self._pipe.recv()
        return seconds, tokens

    def let_run(self, run: bool) -> None:
        """Stop all its processes, or let them go on."""
        assert self._process.pid is not None
        os.killpg(self._process.pid, signal.SIGCONT if run else signal.SIGSTOP)

    async def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join(15)
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what is left of it
        self._process.kill()


def wait_for_jobs(client: Any) -> None:
    """Until no page moves between tiers: one that is filled faster than it is emptied drops pages."""
    while client.stats()["pool_jobs_running/kv"]:
        client.wait_end(0.005)


class PlainEngine:
    """In the place of `Plain` under --tiny: an engine of ours that keeps its pages to itself."""

    def __init__(self, config: Any) -> None:
        from omni_flow.compute.sglang.kernel import SGLangEngine

        self.engine = SGLangEngine(config)

    async def start(self) -> None:
        await self.engine.start()

    def let_run(self, run: bool) -> None:
        let_run(self.engine, run)

    async def close(self) -> None:
        await self.engine.close()


# -- ours -------------------------------------------------------------------------------------------------------------


def let_run(engine: Any, run: bool) -> None:
    """Stop an engine's process, or let it go on; nothing where it has ended."""
    if engine.failure is None:
        os.kill(engine.pid, signal.SIGCONT if run else signal.SIGSTOP)


async def ours(engine: Any, ids: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
    """The same of an engine of ours, all prompts at once, not streamed either."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(answer(engine, prompt, count) for prompt in ids))
    return time.perf_counter() - began, [tokens for tokens, _ in answers]


async def answer(engine: Any, prompt: list[int], count: int) -> tuple[list[int], Any]:
    """Tokens of one request that is not streamed, and its end event."""
    from omni_flow.compute.engine import Request, TokenEvent, Tokens
    from omni_flow.compute.sampling import Sampling

    sampling = Sampling(max_tokens=count, ignore_eos=True)
    request = Request(spans=[Tokens(prompt)], sampling=sampling, stream=False)
    events = [event async for event in engine.generate(request)]
    return [event.token for event in events if isinstance(event, TokenEvent)], events[-1]


async def first_token(engine: Any, prompt: list[int]) -> tuple[float, Any]:
    """Seconds until the first token, and the end event with the request's timeline."""
    from omni_flow.compute.engine import EndEvent, Request, TokenEvent, Tokens
    from omni_flow.compute.sampling import Sampling

    began, seconds, end = time.perf_counter(), 0.0, None
    request = Request(spans=[Tokens(prompt)], sampling=Sampling(max_tokens=1, ignore_eos=True), timeline=True)
    async for event in engine.generate(request):
        if isinstance(event, TokenEvent):
            seconds = time.perf_counter() - began
        elif isinstance(event, EndEvent):
            end = event
    return seconds, end


async def first_and_second(engine: Any, prompt: list[int]) -> tuple[int, float, float]:
    """First token, and when it and the next came."""
    from omni_flow.compute.engine import Request, TokenEvent, Tokens
    from omni_flow.compute.sampling import Sampling

    times, tokens = [], []
    request = Request(spans=[Tokens(prompt)], sampling=Sampling(max_tokens=2, ignore_eos=True))
    async for event in engine.generate(request):
        if isinstance(event, TokenEvent):
            times.append(time.perf_counter())
            tokens.append(event.token)
    return tokens[0], times[0], times[-1]
