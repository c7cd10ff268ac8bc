"""Faults on a GPU, against real processes: `python bench/gpu/faults.py [--tiny] [--json] [--out FILE]`.

Two engines of ours over one memory manager with L1 on the device, L2 in pinned memory and L3 on a disk (a small random
DeepSeek-V2; see `fault_rig.py`). Each check is a line, pass or FAIL; the exit status is 0 when all passed.

killed engine      SIGKILL in mid-decode: its requests fail typed; its session, pages and pins leave the manager within
                   a second; the other engine's tokens stay right; one started in its place maps the weights and goes
                   on from the pages in the pool
full pool          requests wait, those beyond the queue are refused typed, what is served is right
cancel             queued, while pages come from L2, in a middle chunk of prefill, while decoding: the engine and the
                   manager count nothing held
tiers              the tokens of a prompt whose pages come from L1, L2, L3, and after they were evicted everywhere, are
                   those of a cold one
end                nothing is left: leases, processes, memory of the device

--tiny runs every check on a CPU: a model of three layers, L1 in shared memory, no device to count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from checks import Checks, device_mib, device_says, device_settles
from compute import metadata_folder
from fault_rig import CHUNKS, TAIL, WAITING, Answer, Rig

from omni_flow.compute.errors import EngineDied, EngineFull, PromptTooLong
from omni_flow.data.device_memory import Sharing
from omni_flow.data.errors import PoolFull
from omni_flow.data.messages import L1, L2, L3

GONE_WITHIN_S = 1.0
ATTEMPTS = 20
DEVICE_SLACK_MIB = 32.0


def failures(errors: Sequence[BaseException | None]) -> list[str]:
    """Kinds of what requests ended with."""
    return [type(error).__name__ for error in errors]


async def killed_engine(rig: Rig, checks: Checks) -> None:
    """SIGKILL of B while it decodes and A decodes."""
    size, client = rig.size, rig.client
    own, shared = rig.prompt(), rig.prompt()
    expected, warm = await rig.cold(own, size.long), await rig.cold(shared)
    first = await rig.ask(rig.b, shared)
    checks.check("a first answer is that of a tenant of its own", first.tokens == warm, cached=first.cached)
    beside = rig.ask(rig.a, own, size.long)
    await beside.reached(1)
    broken = [rig.ask(rig.b, rig.prompt(size.chunk + TAIL), size.long) for _ in range(2)]
    await asyncio.gather(*(course.reached(3) for course in broken))
    victim, weights, so_far = rig.b.pid, client.stats()["weight_bytes"], len(beside.tokens)
    os.kill(victim, signal.SIGKILL)
    gone = await rig.until(
        lambda: (
            all(row["pid"] != victim for row in client.inspect())
            and not client.stats()["reclaims_running"]
            and not client.check()
        ),
        "the manager has taken everything of the killed engine back",
    )
    ms = round(gone * 1e3, 1)
    checks.check("killed engine: pages and references gone within 1 s", gone <= GONE_WITHIN_S, ms=ms)
    errors = [await course.error() for course in broken]
    typed = all(isinstance(error, EngineDied) for error in errors)
    checks.check("killed engine: its requests fail typed", typed, errors=failures(errors))
    right = (await beside).tokens == expected and so_far < size.long
    checks.check("killed engine: the other's tokens stay right", right, tokens_so_far=so_far, of=size.long)
    sound, counts = await rig.settled(rig.a)
    checks.check("killed engine: the other's counts are the manager's", sound, **counts)
    seconds = await rig.restart_b()
    mapped = (await rig.b.stats())["weights_mapped"]
    loaded = client.stats()["weight_bytes"] - weights
    checks.check(
        "killed engine: one in its place maps the weights", bool(mapped) and not loaded, bytes_loaded=loaded,
        start_s=round(seconds, 1),
    )  # fmt: skip
    again = await rig.ask(rig.b, shared)
    right = again.tokens == warm and again.cached == size.cached
    checks.check("killed engine: one in its place goes on from the pool", right, cached=again.cached)


async def full_pool(rig: Rig, checks: Checks) -> None:
    """More requests than quota and queue take, and a pool whose shared part is taken."""
    prompts = [rig.prompt() for _ in range(WAITING + 5)]
    expected = [await rig.cold(prompt) for prompt in prompts]
    courses = [rig.ask(rig.a, prompt) for prompt in prompts]
    most_waiting = 0
    while not all(course.over for course in courses):
        most_waiting = max(most_waiting, (await rig.a.stats())["waiting"])
    errors = [await course.error() for course in courses]
    served = [
        (course.tokens, wanted) for course, wanted, error in zip(courses, expected, errors, strict=True) if not error
    ]
    refused = [error for error in errors if error]
    checks.check("full pool: requests wait", most_waiting > 0, most_waiting=most_waiting)
    checks.check(
        "full pool: those beyond the queue are refused typed",
        bool(refused) and all(isinstance(error, EngineFull) for error in refused),
        refused=failures(refused),
    )
    checks.check(
        "full pool: what is served is right", bool(served) and all(a == b for a, b in served), served=len(served)
    )
    large = await rig.ask(rig.a, rig.prompt(rig.size.quota * rig.size.page)).error()
    checks.check(
        "full pool: a prompt beyond the quota is refused typed", isinstance(large, PromptTooLong), error=str(large)
    )
    tokens: list[int] = []
    full: PoolFull | None = None
    while full is None:
        try:
            tokens.append(rig.client.reserve("kv", 8, least=1).token)
        except PoolFull as error:
            full = error
    prompt = rig.prompt()
    try:
        answer = await rig.ask(rig.a, prompt)
    finally:
        for token in tokens:
            rig.client.abort("kv", token)
    checks.check(
        "full pool: who has no quota is refused with the holders", bool(full.holders), holders=len(full.holders)
    )
    right = answer.tokens == await rig.cold(prompt)
    checks.check("full pool: who has a quota is served", right)
    sound, counts = await rig.settled(rig.a)
    checks.check("full pool: nothing is held afterwards", sound, **counts)


async def cancels(rig: Rig, checks: Checks) -> None:
    """A request cancelled in each state it can be in."""
    size, engine = rig.size, rig.a
    # while it is queued: the pool takes one such prompt at a time
    prompt = rig.prompt()
    expected = await rig.cold(prompt, size.long)
    running = rig.ask(engine, prompt, size.long)
    await running.reached(1)
    queued = rig.ask(engine, rig.prompt())
    while not (waiting := (await engine.stats())["waiting"]) and not running.over:
        pass
    await queued.cancel()
    answer = await running
    sound, counts = await rig.settled(engine)
    right = bool(waiting) and not queued.tokens and answer.tokens == expected
    checks.check("cancel: queued", right and sound, **counts)
    # while its pages come from L2: the mover is stopped, so they don't
    prompt = rig.prompt()
    expected = await rig.cold(prompt)
    await rig.ask(engine, prompt, 1)
    await rig.unpin()
    await rig.push(prompt, lambda tiers: all(at & L2 and not at & L1 for at in tiers))
    mover = rig.mover("copy mover" if rig.tiny else "CUDA copy mover")
    os.kill(mover, signal.SIGSTOP)
    try:
        loading = rig.ask(engine, prompt)
        while not (await engine.stats())["loading"] and not loading.over:
            pass
        caught = not loading.over
        await loading.cancel()
    finally:
        os.kill(mover, signal.SIGCONT)
    sound, counts = await rig.settled(engine)
    checks.check("cancel: while pages come from L2", caught and not loading.tokens and sound, **counts)
    answer = await rig.ask(engine, prompt)
    checks.check("cancel: asked again it is right", answer.tokens == expected, cached=answer.cached)
    chunk, counts, sound = await cancel_in_prefill(rig)
    checks.check("cancel: in a middle chunk of prefill", 2 <= chunk <= CHUNKS and sound, chunk=chunk, **counts)
    decoding = rig.ask(engine, rig.prompt(), size.long)
    await decoding.reached(3)
    await decoding.cancel()
    sound, counts = await rig.settled(engine)
    middle = 3 <= len(decoding.tokens) < size.long
    checks.check("cancel: while decoding", middle and sound, tokens=len(decoding.tokens), **counts)


async def cancel_in_prefill(rig: Rig) -> tuple[int, dict[str, int], bool]:
    """Cancel once the pages of two chunks are held; returns the chunk it was in (0: never seen in one of the middle),
    and the counts after."""
    per_chunk = rig.size.chunk // rig.size.page
    for _ in range(ATTEMPTS):
        course = rig.ask(rig.a, rig.prompt())
        chunk = 0
        while chunk < 2 and not course.over:
            chunk = (await rig.a.stats())["held"] // per_chunk
        await course.cancel()
        sound, counts = await rig.settled(rig.a)
        if not sound or (2 <= chunk <= CHUNKS and not course.tokens):
            return chunk, counts, sound
    return 0, counts, sound


async def tiers(rig: Rig, checks: Checks) -> None:
    """The same prompt from every tier, and from none."""
    size = rig.size
    prompt, dropped = rig.prompt(), rig.prompt()
    expected, expected_dropped = await rig.cold(prompt), await rig.cold(dropped)
    await rig.ask(rig.a, dropped, 1)
    first = await rig.ask(rig.a, prompt)
    checks.check("tiers: cold", first.tokens == expected and not first.cached)

    def held(answer: Answer, tier: int) -> None:
        hits = dict(zip((L1, L2, L3), answer.hits, strict=True))
        right = answer.tokens == expected and hits[tier] == answer.cached == size.cached
        checks.check(f"tiers: from L{tier.bit_length()}", right, cached=answer.cached, hits=answer.hits)

    held(await rig.ask(rig.a, prompt), L1)
    other = await rig.ask(rig.b, prompt)
    right = other.tokens == expected and other.cached == size.cached
    checks.check("tiers: from L1, computed by another engine", right, cached=other.cached)
    await rig.unpin()
    await rig.push(prompt, lambda at: all(bits & L2 and not bits & L1 for bits in at))
    held(await rig.ask(rig.a, prompt), L2)
    await rig.unpin()
    await rig.push(prompt, lambda at: set(at) == {L3})
    held(await rig.ask(rig.a, prompt), L3)
    await rig.unpin()
    pushed = await rig.push(dropped, lambda at: not any(at))
    answer = await rig.ask(rig.a, dropped)
    right = answer.tokens == expected_dropped and not answer.cached
    checks.check("tiers: after eviction from all", right, pages_stored_meanwhile=pushed, cached=answer.cached)
    for engine, name in ((rig.a, "A"), (rig.b, "B")):
        sound, counts = await rig.settled(engine)
        checks.check(f"tiers: nothing is held by {name} afterwards", sound, **counts)


async def left_of(pids: list[int], seconds: float = 10.0) -> list[int]:
    """Those of some processes that have not ended in time."""
    loop = asyncio.get_running_loop()
    left = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = await loop.run_in_executor(None, select.select, [fd], [], [], seconds)
        os.close(fd)
        left += [] if ready else [pid]
    return left


async def end(rig: Rig, checks: Checks, before_mib: float | None) -> None:
    """Everything closed, and what is left then."""
    await asyncio.gather(rig.a.close(), rig.b.close())
    client = rig.client

    def idle() -> bool:
        stats = client.stats()
        return not (
            stats["reclaims_running"]
            or stats["pool_leases/kv"]
            or stats["pool_reservations/kv"]
            or stats["weight_segments"] != stats["weight_segments_idle"]
        )

    seconds = await rig.until(idle, "no lease, reservation or weight reference is left")
    faults, internal = client.check(), client.stats()["internal_errors"]
    checks.check("end: leases, reservations, weight references", not faults, s=round(seconds, 3), faults=faults)
    movers = [int(row["pid"]) for row in client.inspect() if row["role"] == "mover"]
    status = await rig.close()
    left = await left_of(movers)
    ended = not status and not internal and not left
    checks.check("end: processes", ended, status=status, internal_errors=internal, movers=len(movers), left=left)
    if before_mib is not None:
        after = device_settles(before_mib + DEVICE_SLACK_MIB)
        back = after <= before_mib + DEVICE_SLACK_MIB
        checks.check("end: memory of the device", back, before_mib=before_mib, after_mib=after)


async def run(checks: Checks, work: Path, tiny: bool, sharing: Sharing) -> None:
    """All of it. A step that raises has failed, and the next one runs."""
    before_mib = None if tiny else device_mib()
    began = time.perf_counter()
    rig = Rig(work, tiny, sharing)
    try:
        await rig.start()
        checks.check("both engines serve", True, s=round(time.perf_counter() - began, 1))
        await asyncio.gather(rig.warm(rig.a), rig.warm(rig.b))
        for step in (killed_engine, full_pool, cancels, tiers):
            with checks.step(step.__name__):
                await step(rig, checks)
        with checks.step("end"):
            await end(rig, checks, before_mib)
    finally:
        await rig.close()
        if checks.status:
            print((work / "memory.log").read_text()[-4000:], file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the lines on stderr")
    parser.add_argument("--out", help="write the JSON object here after each check")
    parser.add_argument("--tiny", action="store_true", help="every check on a CPU")
    parser.add_argument("--device-memory", choices=get_args(Sharing), default="auto", help="how the arena is shared")
    options = parser.parse_args()
    device = "CPU" if options.tiny else device_says("name,driver_version")
    checks = Checks(options.json, options.out, device)
    with tempfile.TemporaryDirectory(prefix="omni-faults") as folder:
        work = Path(folder)
        if not options.tiny:
            metadata = work / "metadata"
            metadata.mkdir()
            metadata_folder(metadata)
            os.environ["SGLANG_PLUGINS"] = "omni_bench"
        asyncio.run(run(checks, work, options.tiny, options.device_memory))
    if options.json:
        print(json.dumps(checks.summary()))
    sys.exit(checks.status)


if __name__ == "__main__":
    main()
