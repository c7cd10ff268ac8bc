"""A process that decodes what callers send: `python -m omni_flow.serve.media.worker MEMORY_BYTES`.

Jobs come on stdin and answers go to stdout, each a msgpack struct after its length in 4 bytes. Bytes lie in a memory
file while they are decoded, so nothing of a caller's touches a disk. A job that takes more memory than allowed is
refused; one that crashes the decoder costs this process and nobody else.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Decode `data`: sound at `rate` Hz (None: its own), or a picture."""

    kind: Literal["sound", "picture"]
    data: bytes
    rate: int | None
    max_pixels: int
    max_seconds: float


class Decoded(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Samples (float32) or pixels (uint8), C order."""

    shape: tuple[int, ...]
    data: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Why it can't be decoded, and what to do. `too_large`: it is beyond a limit."""

    reason: str
    mend: str
    too_large: bool = False


Answer = Decoded | Refused
_decode_job = msgspec.msgpack.Decoder(Job).decode


def decode(job: Job) -> Answer:
    """Decode one job in this process."""
    from omni_flow.cli.media import MediaError, MediaTooLarge, read_picture, read_sound

    handle = os.memfd_create("media", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(job.data)
        path = Path(f"/proc/self/fd/{handle}")
        if job.kind == "sound":
            samples = read_sound(path, job.rate, job.max_seconds)
            return Decoded(samples.shape, samples.tobytes())
        pixels = read_picture(path, job.max_pixels)
        return Decoded(pixels.shape, pixels.tobytes())
    except MediaError as error:
        hidden = error.reason.replace(f"{path}", "it").replace(f"'{path}'", "it")
        return Refused(hidden, error.mend, isinstance(error, MediaTooLarge))
    except MemoryError:
        return Refused("takes too much memory to decode", "send something smaller", True)
    finally:
        os.close(handle)


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer jobs until `source` ends."""
    while head := source.read(4):
        job = _decode_job(source.read(int.from_bytes(head, "big")))
        answer = msgspec.msgpack.encode(decode(job))
        sink.write(len(answer).to_bytes(4, "big"))
        sink.write(answer)
        sink.flush()


def main() -> None:
    """Limit this process, then serve."""
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
