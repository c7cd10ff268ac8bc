from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
import soundfile

from omni_flow.cli import values
from omni_flow.cli.errors import UserError
from omni_flow.cli.media import MediaMissing
from omni_flow.control.types import (
    KV,
    Anything,
    Audio,
    Bytes,
    Image,
    Json,
    ListOf,
    OneOf,
    Record,
    Scalar,
    Tensor,
    Text,
    Tokens,
)

SAMPLES = Path(__file__).parents[2] / "examples" / "voice_vision_chat" / "samples"


class Point(msgspec.Struct):
    x: int
    y: int = 0


class Place(pydantic.BaseModel):
    name: str


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return put


@pytest.mark.parametrize(
    ("type_", "given", "value"),
    [
        (Text(), "7", "7"),
        (None, "a word", "a word"),
        (Anything(), "[1, 2]", [1, 2]),
        (Scalar(int), "7", 7),
        (Scalar(float), "7", 7.0),
        (Scalar(bool), "true", True),
        (Json(), '{"a": null}', {"a": None}),
        (Tokens(), "1, 2,3", [1, 2, 3]),
        (Tokens(), "[4]", [4]),
        (ListOf(Text()), '["a", "b"]', ["a", "b"]),
        (Record(Point), '{"x": 1}', Point(1)),
        (ListOf(Record(Point)), '[{"x": 1}]', [Point(1)]),
        (Record(Place), '{"name": "Kiel"}', Place(name="Kiel")),
        (OneOf((Text(), Scalar(int))), "7", 7),
        (OneOf((Text(), Scalar(int))), "seven", "seven"),
    ],
)
def test_a_value_is_written_as_its_type_wants_it(type_: Any, given: str, value: object) -> None:
    found = values.read("--x", type_, given)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("type_", "given", "message"),
    [
        (Scalar(int), "seven", "--x: expected int as JSON, got 'seven'\nExpecting value: line 1 column 1 (char 0)"),
        (Scalar(int), "1.5", "--x: expected int, got float 1.5"),
        (Scalar(int), "true", "--x: expected int, got bool True"),
        (Tokens(), "a b", "--x: expected Tokens as JSON, got '[a b]'\nExpecting value: line 1 column 2 (char 1)"),
        (Json(), "{", None),
        (ListOf(Text()), "[1]", "--x: item 0: expected Text, got int 1"),
        (Record(Point), '{"y": 1}', "--x: no Point: Object missing required field `x`"),
        (Record(Place), "{}", None),
        (OneOf((Scalar(int), Scalar(bool))), "x", "--x: expected int | bool, got 'x'"),
        (KV(), "x", "--x: a KV cache can't be given on the command line\nuse the Python client"),
        (Bytes(), "gone", "--x: gone: No such file or directory\ncheck the path"),
        (Tensor(), "gone.npy", "--x: gone.npy: No such file or directory\ngive an .npy file"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_flags_name(
    folder: Path, type_: Any, given: str, message: str | None
) -> None:
    with pytest.raises(UserError, match=r"^--x: ") as info:
        values.read("--x", type_, given)
    if message is not None:
        assert str(info.value) == message


def test_media_are_read_from_paths_at_the_rate_of_the_field() -> None:
    sound = values.read("--speech", Audio(8_000), str(SAMPLES / "question.wav"))
    own = values.read("--speech", Audio(), str(SAMPLES / "question.wav"))
    assert abs(len(own) / 2 - len(sound)) <= 1
    assert values.read("--picture", Image(), str(SAMPLES / "sign.png")).shape == (400, 640, 3)
    with pytest.raises(MediaMissing):
        values.read("--picture", Image(), "gone.png")


def test_bytes_and_arrays_are_read_from_files(folder: Path) -> None:
    Path("b").write_bytes(b"\0\1")
    assert values.read("--x", Bytes(), "b") == b"\0\1"
    np.save("a.npy", np.arange(6, dtype=np.int64).reshape(2, 3))
    assert values.read("--x", Tensor("int64", (2, None)), "a.npy").shape == (2, 3)
    with pytest.raises(UserError, match=r"--x: expected Tensor\(float32\), got numpy int64 array of shape \(2, 3\)"):
        values.read("--x", Tensor("float32"), "a.npy")
    with pytest.raises(UserError, match=r"--x: b is no \.npy file"):
        values.read("--x", Tensor(), "b")


def test_an_array_of_python_objects_is_never_loaded(folder: Path) -> None:
    np.save("o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"o\.npy is no \.npy file: Object arrays cannot be loaded"):
        values.read("--x", Tensor(), "o.npy")


@pytest.mark.parametrize(
    ("type_", "data", "value"),
    [(Text(), b"two\nlines\n", "two\nlines"), (Bytes(), b"\xff\n", b"\xff\n"), (Scalar(int), b"7\n", 7)],
)
def test_a_dash_reads_stdin(stdin: Callable[[bytes], None], type_: Any, data: bytes, value: object) -> None:
    stdin(data)
    assert values.read("--x", type_, "-") == value


def test_stdin_that_is_no_text_is_refused(stdin: Callable[[bytes], None]) -> None:
    stdin(b"ab\xff")
    with pytest.raises(UserError, match=r"--x: stdin is no UTF-8 text \(invalid start byte at byte 2\)"):
        values.read("--x", Text(), "-")


def test_a_streamed_sound_is_cut_into_tenths_of_a_second(folder: Path) -> None:
    soundfile.write("a.wav", np.zeros(4_000, np.float32), 16_000)
    assert [len(f) for f in values.frames("--x", Audio(16_000), "a.wav")] == [1_600, 1_600, 800]


def test_a_streamed_text_is_sent_line_by_line(folder: Path, stdin: Callable[[bytes], None]) -> None:
    Path("t").write_text("one\n\nthree")
    assert list(values.frames("--x", Text(), "t")) == ["one", "", "three"]
    stdin(b"four\n")
    assert list(values.frames("--x", Text(), "-")) == ["four"]


def test_streamed_values_are_json_lines_rows_blocks_and_pictures(folder: Path) -> None:
    Path("j").write_text("1\n\n2\n")
    assert list(values.frames("--x", Scalar(int), "j")) == [1, 2]
    np.save("a.npy", np.eye(2, dtype=np.float32))
    assert [list(row) for row in values.frames("--x", Tensor("float32", (2,)), "a.npy")] == [[1, 0], [0, 1]]
    Path("b").write_bytes(bytes(values.CHUNK_BYTES + 1))
    assert [len(f) for f in values.frames("--x", Bytes(), "b")] == [values.CHUNK_BYTES, 1]
    assert [f.shape for f in values.frames("--x", Image(), str(SAMPLES / "sign.png"))] == [(400, 640, 3)]
    Path("pictures").mkdir()
    with pytest.raises(UserError, match="--x: pictures holds no file"):
        next(values.frames("--x", Image(), "pictures"))
    (Path("pictures") / "1.png").write_bytes((SAMPLES / "sign.png").read_bytes())
    assert len(list(values.frames("--x", Image(), "pictures"))) == 1


def test_a_wrong_frame_is_named_by_its_number(folder: Path) -> None:
    Path("j").write_text("1\ntrue\n")
    with pytest.raises(UserError, match="--x: expected int, got bool True"):
        list(values.frames("--x", Scalar(int), "j"))
    np.save("a.npy", np.eye(2))
    with pytest.raises(UserError, match=r"--x, frame 0: expected Tensor\(float32\), got numpy float64"):
        list(values.frames("--x", Tensor("float32"), "a.npy"))


@pytest.mark.parametrize(
    ("type_", "stream", "metavar", "text"),
    [
        (Text(), False, "TEXT", "text, or - for stdin"),
        (Text(), True, "FILE", "a text file, or - for stdin, sent line by line"),
        (Audio(16_000), False, "FILE", "a sound file (WAV, FLAC, OGG, MP3)"),
        (Audio(16_000), True, "FILE", "a sound file (WAV, FLAC, OGG, MP3), sent 0.1 s at a time"),
        (Image(), True, "FOLDER", "a folder of pictures, sent one by one"),
        (Tensor(), True, "FILE", "an .npy file, sent row by row"),
        (Scalar(int), False, "VALUE", "int as JSON, or - for stdin"),
        (None, False, "VALUE", "JSON, or - for stdin"),
        (Json(), True, "FILE", "a file of JSON lines, each Json as JSON, or - for stdin, sent one by one"),
    ],
)
def test_help_says_what_to_give(type_: Any, stream: bool, metavar: str, text: str) -> None:
    assert values.metavar(type_, stream) == metavar
    assert values.describe(type_, stream) == text
