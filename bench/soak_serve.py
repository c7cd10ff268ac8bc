"""A soak of the server: good, bad and cancelled traffic, and kills of replicas, for as long as you like.

Prints one JSON object: requests by what became of them, hung ones, memory at the beginning and the end, and what is
left at the end. Exits 1 if a request hung, memory grew, or anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from serve_rig import group_mb, server

HUNG_S = 60.0
GROWTH_MB = 64.0
BAD: tuple[tuple[str, bytes], ...] = (
    ("/v1/graphs/bench/requests", b"{"),
    ("/v1/graphs/bench/requests", b'{"inputs": {"nope": 1}}'),
    ("/v1/graphs/bench/requests", b'{"inputs": {"text": 5}}'),
    ("/v1/graphs/nope/requests", b"{}"),
    ("/v1/chat/completions", b'{"model": "nope", "messages": []}'),
)


class Soak:
    """Callers that go on until told to stop."""

    def __init__(self, port: int, pid: int, rng: random.Random, pause_s: float) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.pid, self.rng, self.pause_s = pid, rng, pause_s
        self.counts: Counter[str] = Counter()
        self.stop = asyncio.Event()

    async def caller(self, http: httpx.AsyncClient) -> None:
        kinds = (self.whole, self.whole, self.streamed, self.left, self.late, self.bad)
        while not self.stop.is_set():
            try:
                async with asyncio.timeout(HUNG_S):
                    await self.rng.choice(kinds)(http)
            except TimeoutError:
                self.counts["hung"] += 1
            except httpx.HTTPError as error:
                self.counts[f"broke: {type(error).__name__}"] += 1
            await asyncio.sleep(self.pause_s)

    async def post(self, http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        return await http.post(f"{self.url}/v1/graphs/bench/requests", json=body)

    async def whole(self, http: httpx.AsyncClient) -> None:
        answer = await self.post(http, {"inputs": {"text": "x" * self.rng.randrange(1, 20_000)}, "outputs": ["say"]})
        self.counts[f"whole {answer.status_code}"] += 1

    async def late(self, http: httpx.AsyncClient) -> None:
        body = {"inputs": {"idle": "x"}, "outputs": ["wait"], "deadline_s": self.rng.uniform(0.01, 0.5)}
        answer = await self.post(http, body)
        self.counts[f"deadline {answer.status_code}"] += 1

    async def streamed(self, http: httpx.AsyncClient) -> None:
        body = {"inputs": {"number": str(self.rng.randrange(1, 500))}, "outputs": ["count"], "stream": True}
        async with http.stream("POST", f"{self.url}/v1/graphs/bench/requests", json=body) as answer:
            text = (await answer.aread()).decode()
        ended = "done" if '"outcome":"done"' in text else "failed" if '"outcome":"failed"' in text else "refused"
        self.counts[f"streamed {ended}"] += 1

    async def left(self, http: httpx.AsyncClient) -> None:
        body = {"inputs": {self.rng.choice(("idle", "number")): "1000"}, "stream": True}
        async with http.stream("POST", f"{self.url}/v1/graphs/bench/requests", json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
        self.counts["left"] += 1

    async def bad(self, http: httpx.AsyncClient) -> None:
        path, body = self.rng.choice(BAD)
        head = {"content-type": "application/json"}
        answer = await http.post(self.url + path, content=body, headers=head)
        fine = 400 <= answer.status_code < 500 and "error" in answer.json()
        self.counts["refused" if fine else f"refused wrongly with {answer.status_code}"] += 1

    async def killer(self, http: httpx.AsyncClient, every_s: float) -> None:
        while not self.stop.is_set():
            try:
                async with asyncio.timeout(self.rng.uniform(0.5, 1.5) * every_s):
                    await self.stop.wait()
                return
            except TimeoutError:
                pass  # the time for a kill has come
            health = (await http.get(f"{self.url}/health")).json()
            pids = [r["pid"] for role in health["graphs"]["bench"].values() for r in role["replicas"] if r["pid"]]
            if pids:
                os.kill(self.rng.choice(pids), signal.SIGKILL)
                self.counts["kills"] += 1


async def left_over(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    """What is held once the last requests have been closed everywhere; asked until nothing is, or for ten seconds."""
    found: dict[str, float] = {}
    for _ in range(20):
        live = (await http.get(f"{url}/v1/live", params={"once": "true"})).json()
        found = {"live": live["live"]}
        for role in live["graphs"][0]["roles"]:
            for replica in role["replicas"]:
                held = replica["held"] or {"unknown": 1}  # it is being started again
                for what, number in held.items():
                    found[what] = found.get(what, 0) + number
        if not any(found.values()):
            break
        await asyncio.sleep(0.5)
    return found


async def soak(minutes: float, callers: int, kill_s: float, pause_s: float, seed: int) -> dict[str, Any]:
    async with server() as (port, pid):
        run = Soak(port, pid, random.Random(seed), pause_s)
        limits = httpx.Limits(max_connections=callers + 4, max_keepalive_connections=callers + 4)
        async with httpx.AsyncClient(timeout=HUNG_S * 2, limits=limits) as http:
            tasks = [asyncio.ensure_future(run.caller(http)) for _ in range(callers)]
            tasks.append(asyncio.ensure_future(run.killer(http, kill_s)))
            began = time.monotonic()
            samples = []
            while (passed := time.monotonic() - began) < minutes * 60:
                await asyncio.sleep(min(10.0, max(1.0, minutes * 60 - passed)))
                samples.append(round(group_mb(pid), 1))
                print(f"{passed / 60:6.1f} min  {samples[-1]:7.1f} MB  {dict(run.counts)}", file=sys.stderr, flush=True)
            run.stop.set()
            await asyncio.gather(*tasks, return_exceptions=True)
            left = await left_over(http, run.url)
    settled = samples[len(samples) // 5 :] or samples
    third = max(1, len(settled) // 3)
    growth = min(settled[-third:]) - max(settled[:third])
    return {
        "minutes": minutes,
        "counts": dict(sorted(run.counts.items())),
        "hung": run.counts["hung"],
        "memory_mb": {"first": samples[0], "last": samples[-1], "most": max(samples), "growth": round(growth, 1)},
        "left": left,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument(
        "--kill-every", type=float, default=45.0, metavar="S", help="seconds between kills of a replica"
    )
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="S", help="what a caller waits between its requests"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = asyncio.run(soak(options.minutes, options.callers, options.kill_every, options.pause, options.seed))
    print(json.dumps(found))
    wrong = [name for name in found["counts"] if "wrongly" in name]
    if found["hung"] or found["memory_mb"]["growth"] > GROWTH_MB or any(found["left"].values()) or wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
