"""Sound out: samples as they come, in the formats of OpenAI's API."""

from __future__ import annotations

import importlib.util
import io
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_flow.serve.errors import unsupported
from omni_flow.serve.values import pcm16

PCM_RATE = 24_000
"""Plain samples have no header, so their rate is fixed: OpenAI's."""

MEDIA_TYPES = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}
_FILES = {"mp3": ("MP3", "MPEG_LAYER_III"), "flac": ("FLAC", "PCM_16"), "opus": ("OGG", "OPUS")}


def check_format(form: str, field: str) -> str:
    """The format, if it can be made. Raises ApiError naming `field`."""
    known = [name for name in MEDIA_TYPES if name != "aac" or importlib.util.find_spec("av") is not None]
    if form not in known:
        raise unsupported(field, f"format {form!r} can't be made here; there is {', '.join(known)}")
    return form


class SoundStream:
    """Takes samples at `rate` and gives the bytes of one file in pieces.

    The head of a FLAC file that is sent while it is made says that its length is unknown, which the format has a value
    for. `whole`: nothing comes before the end, and the head says the length.
    """

    def __init__(self, form: str, rate: int, whole: bool = False) -> None:
        self._form, self._whole = form, whole
        target = PCM_RATE if form in ("pcm", "pcm16", "opus", "aac") else rate
        self._resample: Any = None
        if target != rate:
            import soxr

            self._resample = soxr.ResampleStream(rate, target, 1, dtype="float32")
        self.rate = target
        self.samples = 0
        self._sink: _Sink | None = None
        self._file: Any = None
        self._started = False
        if form == "aac":
            self._sink = _Sink()
            self._file = _Aac(self._sink, target)
        elif form in _FILES:
            import soundfile

            kind, subtype = _FILES[form]
            self._sink = _Sink()
            self._file = soundfile.SoundFile(self._sink, "w", target, 1, subtype=subtype, format=kind)

    def feed(self, chunk: NDArray[np.float32]) -> bytes:
        """The bytes that are ready after these samples, shape (n,)."""
        self.samples += len(chunk)
        if self._resample is not None:
            chunk = self._resample.resample_chunk(chunk)
        return self._bytes(chunk)

    def finish(self) -> bytes:
        """The last bytes."""
        last = b""
        if self._resample is not None:
            last = self._bytes(self._resample.resample_chunk(np.zeros(0, np.float32), last=True))
        if self._file is None:
            return last or self._bytes(np.zeros(0, np.float32))
        self._file.close()
        assert self._sink is not None
        return last + self._sink.take()

    def _bytes(self, chunk: NDArray[np.float32]) -> bytes:
        if self._file is not None:
            assert self._sink is not None
            self._file.write(np.clip(chunk, -1.0, 1.0))
            return b"" if self._whole else self._sink.take()
        data = pcm16(chunk)
        if self._form == "wav" and not self._started:
            self._started = True
            return wav_head(self.rate, None) + data
        return data


def encode(form: str, rate: int, samples: NDArray[np.float32]) -> bytes:
    """A whole file."""
    if form == "wav":
        data = pcm16(samples)
        return wav_head(rate, len(data)) + data
    stream = SoundStream(form, rate, whole=True)
    return stream.feed(samples) + stream.finish()


def wav_head(rate: int, size: int | None) -> bytes:
    """The header of 16-bit mono WAV; `size` None: its end is not known yet."""
    whole = 0xFFFFFFFF if size is None else size + 36
    body = 0xFFFFFFFF if size is None else size
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", whole, b"WAVE", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return head + struct.pack("<4sI", b"data", body)


class _Aac:
    """AAC in ADTS frames, written as `soundfile.SoundFile` is."""

    def __init__(self, sink: _Sink, rate: int) -> None:
        import av

        self._av, self._rate, self._samples = av, rate, 0
        self._container = av.open(sink, "w", format="adts")
        self._stream = self._container.add_stream("aac", rate=rate, layout="mono")

    def write(self, samples: NDArray[np.float32]) -> None:
        if not len(samples):
            return
        frame = self._av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._samples
        self._samples += len(samples)
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()


class _Sink(io.RawIOBase):
    """A file that is taken away while it is written. What is written again of a part that is gone is dropped."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._gone = 0
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        end = self._gone + len(self._data)
        self._at = offset + (0 if whence == 0 else self._at if whence == 1 else end)
        return self._at

    def write(self, data: Any) -> int:
        given = bytes(data)
        start = self._at - self._gone
        kept = given[-start:] if start < 0 else given
        start = max(start, 0)
        if len(given) > self._gone - self._at:
            self._data[start : start + len(kept)] = kept
        self._at += len(given)
        return len(given)

    def take(self) -> bytes:
        """What was written and not taken yet."""
        taken = bytes(self._data)
        self._gone += len(taken)
        self._data.clear()
        return taken
