"""Decoding processes: started when first needed, one job each at a time, replaced when they die or take too long."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from omni_flow.serve.media.worker import Answer, Job, Refused

_decode_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class DecodePool:
    """At most `size` processes of `memory_bytes` each; a job may take `decode_s` seconds."""

    def __init__(self, size: int, decode_s: float, memory_bytes: int) -> None:
        self._free: asyncio.LifoQueue[asyncio.subprocess.Process | None] = asyncio.LifoQueue()
        for _ in range(size):
            self._free.put_nowait(None)
        self._decode_s, self._memory = decode_s, memory_bytes
        self._live: set[asyncio.subprocess.Process] = set()

    async def run(self, job: Job) -> Answer:
        """The answer of a process; `Refused` too when it died of the job or took too long."""
        process = await self._free.get()
        kept: asyncio.subprocess.Process | None = None
        try:
            if process is None or process.returncode is not None:
                process = await self._start()
            try:
                async with asyncio.timeout(self._decode_s):
                    answer = await self._ask(process, job)
                kept = process
            except TimeoutError:
                return Refused(f"takes more than {self._decode_s:g} s to decode", "send something smaller", True)
            except (asyncio.IncompleteReadError, ConnectionError):
                return Refused("the decoder can't take it: the file is damaged or too large", "export it again")
            return answer
        finally:
            if kept is None and process is not None:
                self._end(process)
            self._free.put_nowait(kept)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "omni_flow.serve.media.worker", str(self._memory)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a ^C at the terminal is the server's to answer
        )
        self._live.add(process)
        return process

    async def _ask(self, process: asyncio.subprocess.Process, job: Job) -> Answer:
        assert process.stdin is not None
        assert process.stdout is not None
        data = msgspec.msgpack.encode(job)
        process.stdin.write(len(data).to_bytes(4, "big"))
        process.stdin.write(data)
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(4), "big")
        return _decode_answer.decode(await process.stdout.readexactly(size))

    def _end(self, process: asyncio.subprocess.Process) -> None:
        self._live.discard(process)
        if process.returncode is None:
            process.kill()

    async def close(self) -> None:
        """End all processes."""
        ended = list(self._live)
        for process in ended:
            self._end(process)
        for process in ended:
            await process.wait()
