from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from omni_flow.cli import media

SAMPLES = Path(__file__).parents[2] / "examples" / "voice_vision_chat" / "samples"


def tone(rate: int, seconds: float, channels: int = 1) -> np.ndarray:
    wave = 0.5 * np.sin(np.arange(int(rate * seconds)) * (2 * np.pi * 440 / rate))
    return np.repeat(wave[:, None], channels, axis=1).astype(np.float32)


@pytest.mark.parametrize(
    ("rate", "channels", "name"),
    [(16_000, 1, "a.wav"), (44_100, 2, "a.wav"), (8_000, 1, "a.flac"), (48_000, 2, "a.ogg")],
)
def test_sound_comes_as_mono_float32_at_the_rate_asked_for(tmp_path: Path, rate: int, channels: int, name: str) -> None:
    soundfile.write(tmp_path / name, tone(rate, 0.5, channels), rate)
    samples = media.read_sound(tmp_path / name, 16_000)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert abs(len(samples) - 8_000) <= 1
    spectrum = np.abs(np.fft.rfft(samples))
    assert abs(np.argmax(spectrum) * 16_000 / len(samples) - 440) < 4


def test_without_a_rate_the_files_own_is_kept(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(22_050, 0.5), 22_050)
    assert len(media.read_sound(tmp_path / "a.wav")) == 11_025


def written(path: Path, *chunks: np.ndarray) -> media.SoundWriter:
    writer = media.SoundWriter(path, 24_000)
    for chunk in chunks:
        writer.write(chunk)
    writer.close()
    writer.close()
    return writer


def test_written_sound_reads_back(tmp_path: Path) -> None:
    wave = tone(24_000, 0.5)[:, 0]
    assert written(tmp_path / "answer.wav", wave[:5_000], wave[5_000:], wave[:0]).seconds == 0.5
    read, rate = soundfile.read(tmp_path / "answer.wav", dtype="float32")
    assert rate == 24_000
    assert np.allclose(read, wave, atol=1e-4)


def test_an_answer_without_sound_is_an_empty_wav(tmp_path: Path) -> None:
    assert written(tmp_path / "answer.wav").seconds == 0.0
    assert soundfile.info(tmp_path / "answer.wav").frames == 0


def test_louder_than_full_scale_is_clipped_not_wrapped(tmp_path: Path) -> None:
    written(tmp_path / "answer.wav", np.full(100, 1.5, np.float32))
    samples, _ = soundfile.read(tmp_path / "answer.wav")
    assert samples.min() > 0.99


def test_a_written_picture_reads_back(tmp_path: Path) -> None:
    picture = media.read_picture(SAMPLES / "sign.png")
    media.write_picture(tmp_path / "copy.png", picture)
    assert (media.read_picture(tmp_path / "copy.png") == picture).all()


@pytest.mark.parametrize("keep", [20, 40, 44, 1_000])
def test_a_cut_off_wav_is_corrupt(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.wav"
    path.write_bytes((SAMPLES / "question.wav").read_bytes()[:keep])
    with pytest.raises(media.MediaCorrupt, match=r"cut\.wav: the file is cut off\nrecord or copy it again"):
        media.read_sound(path)


def test_a_wav_with_a_damaged_header_is_corrupt(tmp_path: Path) -> None:
    data = bytearray((SAMPLES / "question.wav").read_bytes())
    data[12:16] = b"\0\0\0\0"
    path = tmp_path / "bad.wav"
    path.write_bytes(data)
    with pytest.raises(media.MediaCorrupt, match="damaged sound file"):
        media.read_sound(path)


def test_a_wav_of_unknown_length_is_read_to_its_end(tmp_path: Path) -> None:
    data = bytearray((SAMPLES / "question.wav").read_bytes())
    data[4:8] = data[40:44] = b"\xff" * 4
    (tmp_path / "piped.wav").write_bytes(data)
    assert len(media.read_sound(tmp_path / "piped.wav")) == len(media.read_sound(SAMPLES / "question.wav"))


def test_a_wav_with_no_numbers_in_it_is_corrupt(tmp_path: Path) -> None:
    wave = tone(16_000, 0.1)
    wave[100] = np.nan
    soundfile.write(tmp_path / "nan.wav", wave, 16_000, subtype="FLOAT")
    with pytest.raises(media.MediaCorrupt, match="no numbers"):
        media.read_sound(tmp_path / "nan.wav")


def test_a_wav_without_samples_is_corrupt(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "none.wav", np.zeros(0, np.float32), 16_000)
    with pytest.raises(media.MediaCorrupt, match="holds no sound"):
        media.read_sound(tmp_path / "none.wav")


def test_a_picture_given_as_speech_is_the_wrong_kind() -> None:
    with pytest.raises(media.MediaWrongKind, match="no sound file"):
        media.read_sound(SAMPLES / "sign.png")


def test_speech_over_the_limit_is_too_large(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(8_000 * 601, np.float32), 8_000)
    with pytest.raises(media.MediaTooLarge, match="601 s of sound\ngive 600 s or less"):
        media.read_sound(tmp_path / "long.wav")


@pytest.mark.parametrize("read", [media.read_sound, media.read_picture])
class TestAnyFile:
    def test_that_is_missing_is_named(self, tmp_path: Path, read: object) -> None:
        assert callable(read)
        with pytest.raises(media.MediaMissing, match=r"gone\.bin: no such file\ncheck the path"):
            read(tmp_path / "gone.bin")

    def test_that_is_a_folder_is_missing(self, tmp_path: Path, read: object) -> None:
        assert callable(read)
        with pytest.raises(media.MediaMissing):
            read(tmp_path)

    def test_that_is_empty_is_corrupt(self, tmp_path: Path, read: object) -> None:
        assert callable(read)
        (tmp_path / "empty").touch()
        with pytest.raises(media.MediaCorrupt, match="empty file"):
            read(tmp_path / "empty")

    def test_over_the_size_limit_is_refused_before_it_is_read(self, tmp_path: Path, read: object) -> None:
        assert callable(read)
        with (tmp_path / "big").open("wb") as file:
            file.truncate(media.MAX_BYTES + 1)
        with pytest.raises(media.MediaTooLarge, match="give a file of 64 MiB or less"):
            read(tmp_path / "big")

    def test_of_noise_is_the_wrong_kind(self, tmp_path: Path, read: object) -> None:
        assert callable(read)
        (tmp_path / "noise").write_bytes(np.random.default_rng(1).bytes(5_000))
        with pytest.raises(media.MediaWrongKind):
            read(tmp_path / "noise")


@pytest.mark.parametrize(
    ("mode", "name"), [("RGB", "a.png"), ("L", "a.png"), ("1", "a.png"), ("P", "a.gif"), ("CMYK", "a.jpg")]
)
def test_pictures_of_every_mode_come_as_rgb(tmp_path: Path, mode: str, name: str) -> None:
    Image.new("RGB", (8, 4), "white").convert(mode).save(tmp_path / name)
    picture = media.read_picture(tmp_path / name)
    assert picture.dtype == np.uint8
    assert picture.shape == (4, 8, 3)
    assert picture.min() >= 250


def test_a_picture_is_turned_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 4))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert media.read_picture(tmp_path / "turned.jpg").shape == (8, 4, 3)


def test_transparent_parts_are_white(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (media.read_picture(tmp_path / "clear.png") == 255).all()


@pytest.mark.parametrize("keep", [40, 1_000, 10_000])
def test_a_cut_off_picture_is_corrupt(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.png"
    path.write_bytes((SAMPLES / "sign.png").read_bytes()[:keep])
    with pytest.raises(media.MediaCorrupt, match=r"cut\.png: damaged picture"):
        media.read_picture(path)


def test_a_picture_with_a_flipped_byte_is_corrupt(tmp_path: Path) -> None:
    data = bytearray((SAMPLES / "sign.png").read_bytes())
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "flipped.png"
    path.write_bytes(data)
    with pytest.raises(media.MediaCorrupt, match="damaged picture"):
        media.read_picture(path)


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    Image.new("1", (10_000, 4_001)).save(tmp_path / "huge.png")
    with pytest.raises(media.MediaTooLarge, match="10000 × 4001 pixels\nscale it to 40 megapixels or less"):
        media.read_picture(tmp_path / "huge.png")


def test_a_header_that_claims_gigapixels_is_too_large(tmp_path: Path) -> None:
    head = b"P6 60000 60000 255\n"
    (tmp_path / "bomb.ppm").write_bytes(head + b"\1\2\3")
    with pytest.raises(media.MediaTooLarge):
        media.read_picture(tmp_path / "bomb.ppm")


def test_speech_given_as_picture_is_the_wrong_kind() -> None:
    with pytest.raises(media.MediaWrongKind, match="no picture of a known format"):
        media.read_picture(SAMPLES / "question.wav")
