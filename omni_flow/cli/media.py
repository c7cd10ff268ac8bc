"""Files to arrays and back: sound as mono float32 at the rate asked for, pictures as RGB uint8.

Sizes are checked before anything is decoded. Every error of a file is a MediaError that names the file and the mend.
Needs the extra `[media]`.
"""

from __future__ import annotations

import struct
import wave
from pathlib import Path

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from omni_flow.cli.errors import UserError

MAX_SECONDS = 600.0
MAX_PIXELS = 40_000_000
MAX_BYTES = 64 * 2**20
_PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_PICTURE_HEADS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_SOUND_HEADS = (b"RIFF", b"fLaC", b"OggS", b"ID3")


class MediaError(UserError):
    """A file that can't be used. `path` is the file, `reason` what is wrong with it, `mend` what to do."""

    def __init__(self, path: Path, reason: str, mend: str) -> None:
        super().__init__(f"{path}: {reason}", mend)
        self.path, self.reason = path, reason


class MediaMissing(MediaError):
    """There is no such file, or it can't be read."""


class MediaWrongKind(MediaError):
    """The file is no sound, or no picture, of a known format."""


class MediaCorrupt(MediaError):
    """The file is of a known format but damaged, cut off or empty."""


class MediaTooLarge(MediaError):
    """The file is longer or larger than accepted."""


def read_sound(path: Path, rate: int | None = None, max_seconds: float = MAX_SECONDS) -> NDArray[np.float32]:
    """The sound in `path` (WAV, FLAC, OGG, MP3) as samples in [-1, 1], shape (n,), n ≥ 1, at `rate` Hz.

    Channels are averaged, other rates resampled; None keeps the file's rate. Raises a MediaError.
    """
    _check_file(path)
    _check_riff(path)
    try:
        with soundfile.SoundFile(path) as file:
            seconds = file.frames / file.samplerate
            if seconds > max_seconds:
                raise MediaTooLarge(path, f"{seconds:.0f} s of sound", f"give {max_seconds:.0f} s or less")
            samples = file.read(dtype="float32", always_2d=True).mean(axis=1)
            own = file.samplerate
    except soundfile.LibsndfileError as error:
        if _starts_with(path, _SOUND_HEADS):
            raise MediaCorrupt(path, f"damaged sound file ({error})", "record or export it again") from error
        raise MediaWrongKind(path, f"no sound file ({error})", "give a WAV, FLAC, OGG or MP3 file") from error
    if not len(samples):
        raise MediaCorrupt(path, "holds no sound", "record or export it again")
    if not np.isfinite(samples).all():
        raise MediaCorrupt(path, "holds samples that are no numbers", "record or export it again")
    if rate is not None and rate != own:
        samples = soxr.resample(samples, own, rate)
    return np.clip(np.asarray(samples, np.float32), np.float32(-1), np.float32(1))


def read_picture(path: Path, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """The picture in `path` (PNG, JPEG, WebP, GIF, BMP, TIFF, PPM) as RGB, shape (height, width, 3), turned upright.

    Transparent parts are laid on white; of an animation the first image is taken. Raises a MediaError.
    """
    _check_file(path)
    try:
        with Image.open(path, formats=_PICTURE_FORMATS) as file:
            if file.width * file.height > max_pixels:
                raise MediaTooLarge(
                    path,
                    f"{file.width} × {file.height} pixels",
                    f"scale it to {max_pixels / 10**6:g} megapixels or less",
                )
            picture = ImageOps.exif_transpose(file)
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            return np.array(picture.convert("RGB"), dtype=np.uint8)
    except UnidentifiedImageError as error:
        if _starts_with(path, _PICTURE_HEADS):
            raise MediaCorrupt(path, "damaged picture (its header)", "save or export it again") from error
        raise MediaWrongKind(path, "no picture of a known format", "give a PNG, JPEG or WebP file") from error
    except Image.DecompressionBombError as error:
        raise MediaTooLarge(path, str(error), f"scale it to {MAX_PIXELS // 10**6} megapixels or less") from error
    except (OSError, SyntaxError, struct.error, EOFError) as error:
        raise MediaCorrupt(path, f"damaged picture ({error})", "save or export it again") from error


class SoundWriter:
    """A 16-bit mono WAV that grows by chunks of samples in [-1, 1]; louder ones are clipped.

    It is a whole file after `close`; one without chunks has length 0. Raises OSError when it can't be written.
    """

    def __init__(self, path: Path, rate: int) -> None:
        self.path, self.rate, self.samples = path, rate, 0
        self._out = path.open("wb")
        self._file = wave.open(self._out, "wb")  # noqa: SIM115
        self._file.setparams((1, 2, rate, 0, "NONE", "not compressed"))

    @property
    def seconds(self) -> float:
        """What has been written so far."""
        return self.samples / self.rate

    def write(self, chunk: NDArray[np.float32]) -> None:
        """Append samples, shape (n,)."""
        self._file.writeframesraw(np.rint(np.clip(chunk, -1.0, 1.0) * 32767).astype("<i2").tobytes())
        self.samples += len(chunk)

    def close(self) -> None:
        """Write the header and close the file. A second call does nothing."""
        try:
            self._file.close()
        finally:
            self._out.close()


def write_picture(path: Path, picture: NDArray[np.uint8]) -> None:
    """Write RGB of shape (height, width, 3) as a PNG. Raises OSError when it can't be written."""
    Image.fromarray(picture).save(path, "PNG")


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise MediaMissing(path, "no such file", "check the path")
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except OSError as error:
        raise MediaMissing(path, f"can't be read ({error.strerror})", "check its permissions") from error
    if size == 0:
        raise MediaCorrupt(path, "empty file", "record or export it again")
    if size > MAX_BYTES:
        raise MediaTooLarge(path, f"{size / 2**20:.0f} MiB", f"give a file of {MAX_BYTES >> 20} MiB or less")


def _check_riff(path: Path) -> None:
    """A WAV that is cut off decodes without complaint to a part of what was said, so its size is looked at here."""
    with path.open("rb") as file:
        head = file.read(12)
    if len(head) < 12 or head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return
    (declared,) = struct.unpack("<I", head[4:8])
    unknown = declared in (0, 0xFFFFFFFF)  # written by programs that stream and can't go back to fill it in
    if not unknown and declared + 8 > path.stat().st_size:
        raise MediaCorrupt(path, "the file is cut off", "record or copy it again")


def _starts_with(path: Path, heads: tuple[bytes, ...]) -> bool:
    with path.open("rb") as file:
        return file.read(8).startswith(heads)
