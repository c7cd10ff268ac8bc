"""From what a caller sent for a picture or a sound to an array."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_flow.serve.errors import ApiError, bad
from omni_flow.serve.media.fetch import Fetcher
from omni_flow.serve.media.pool import DecodePool
from omni_flow.serve.media.worker import Job, Refused
from omni_flow.serve.settings import MediaSettings

RAW = ("pcm16", "f32")
"""Formats of sound that are plain samples: nothing is decoded."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A part of a multipart body."""

    data: bytes
    name: str = ""
    type: str = ""


class Media:
    """Fetches and decodes, within the limits of its settings."""

    def __init__(self, settings: MediaSettings, fetcher: Fetcher | None = None) -> None:
        self.settings = settings
        self._pool = DecodePool(settings.workers, settings.decode_s, settings.memory_bytes)
        self._fetch = fetcher or Fetcher(settings.url_hosts, settings.max_bytes, settings.fetch_s)

    async def picture(self, raw: Any, field: str) -> NDArray[np.uint8]:
        """RGB, (height, width, 3), of a data URL, {"data": base64}, {"url"}, base64 text or an Upload.

        Raises ApiError naming `field`.
        """
        data, _, _ = await self._bytes(raw, field)
        shape, pixels = await self._decode("picture", data, None, field)
        return np.frombuffer(pixels, np.uint8).reshape(shape)

    async def sound(self, raw: Any, rate: int | None, field: str) -> NDArray[np.float32]:
        """Mono samples at `rate`, from what `picture` takes; or {"data", "format": "pcm16" or "f32", "rate"}."""
        data, form, own = await self._bytes(raw, field)
        if form in RAW:
            return await self.samples(data, form, own, rate, field)
        shape, samples = await self._decode("sound", data, rate, field)
        return np.frombuffer(samples, np.float32).reshape(shape)

    async def blob(self, raw: Any, field: str) -> bytes:
        """The bytes themselves."""
        return (await self._bytes(raw, field))[0]

    async def _bytes(self, raw: Any, field: str) -> tuple[bytes, str, int | None]:
        """What was sent, its stated format and rate."""
        form, rate = "", None
        if isinstance(raw, Upload):
            data = raw.data
        elif isinstance(raw, str):
            data = await self._of_url(raw, field) if ":" in raw[:12] else unbase64(raw, field)
        elif isinstance(raw, dict):
            unknown = set(raw) - {"data", "url", "format", "rate", "type", "shape", "dtype"}
            if unknown:
                raise bad(f"unknown field {sorted(unknown)[0]!r}", f"{field}.{sorted(unknown)[0]}", "unknown_parameter")
            form, rate = raw.get("format") or "", raw.get("rate")
            if isinstance(raw.get("url"), str):
                data = await self._of_url(raw["url"], f"{field}.url")
            elif isinstance(raw.get("data"), str):
                data = unbase64(raw["data"], f"{field}.data")
            else:
                raise bad("expected data (base64) or url", field)
        else:
            raise bad(f"expected a data: URL, or an object with data or url, got {type(raw).__name__}", field)
        if len(data) > self.settings.max_bytes:
            raise ApiError(413, f"more than {self.settings.max_bytes} bytes", param=field, code="too_large")
        return data, form, rate

    async def _of_url(self, url: str, field: str) -> bytes:
        if not url.startswith("data:"):
            return await self._fetch.get(url, field)
        head, comma, body = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise bad("a data: URL is data:TYPE;base64,DATA", field)
        return unbase64(body, field)

    async def samples(self, data: bytes, form: str, own: Any, rate: int | None, field: str) -> NDArray[np.float32]:
        """Plain samples (`form` of RAW) of `own` Hz at `rate` Hz. Raises ApiError naming `field`."""
        width = 2 if form == "pcm16" else 4
        if len(data) % width or not data:
            raise bad(f"{form} takes a multiple of {width} bytes, not {len(data)}", field)
        own = rate if own is None else own
        if not isinstance(own, int) or isinstance(own, bool) or not 1000 <= own <= 192_000:
            raise bad("rate is a number of Hz from 1000 to 192000", f"{field}.rate")
        if len(data) / width / own > self.settings.max_seconds:
            raise ApiError(413, f"more than {self.settings.max_seconds:g} s", param=field, code="too_large")
        if form == "pcm16":
            samples = np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)
        else:
            samples = np.frombuffer(data, "<f4").astype(np.float32)
            if not np.isfinite(samples).all():
                raise bad("there are samples that are no numbers", field)
            samples = np.clip(samples, np.float32(-1), np.float32(1))
        if rate is None or rate == own:
            return samples
        import soxr

        return np.asarray(soxr.resample(samples, own, rate), np.float32)

    async def _decode(self, kind: Any, data: bytes, rate: int | None, field: str) -> tuple[tuple[int, ...], bytes]:
        job = Job(kind, data, rate, self.settings.max_pixels, self.settings.max_seconds)
        answer = await self._pool.run(job)
        if isinstance(answer, Refused):
            status, code = (413, "too_large") if answer.too_large else (400, "invalid_media")
            raise ApiError(status, f"{kind}: {answer.reason}; {answer.mend}", param=field, code=code)
        return answer.shape, answer.data

    async def close(self) -> None:
        """End the decoding processes."""
        await self._pool.close()


def unbase64(text: str, field: str) -> bytes:
    """Raises ApiError naming `field`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(f"no base64: {error}", field) from error
