from __future__ import annotations

import contextlib
import io
from pathlib import Path

import msgspec
import numpy as np
import pydantic
import pytest
import soundfile

from omni_flow.cli import timeline
from omni_flow.cli.errors import UserError
from omni_flow.cli.media import read_picture
from omni_flow.cli.show import Kind, Show
from omni_flow.control.runtime.live_request import Span
from omni_flow.control.types import Audio, Bytes, Image, Json, Record, Tensor, Text
from omni_flow.refs import ABSENT

TEXT, TOKENS = Kind(Text(), False), Kind(Text(), True)
SOUND = Kind(Audio(8_000), True)


class Point(msgspec.Struct):
    x: int


class Place(pydantic.BaseModel):
    name: str


def shown(folder: Path, outputs: dict[str, Kind], *values: tuple[str, object]) -> tuple[str, dict[str, object]]:
    out = io.StringIO()
    show = Show(outputs, folder / "out", out)
    for name, value in values:
        show(name, value)
    found = show.finish()
    return out.getvalue(), found


def test_a_streamed_text_grows_on_its_line(tmp_path: Path) -> None:
    text, found = shown(tmp_path, {"text": TOKENS}, ("text", "a "), ("text", "b"))
    assert text == "a b\n"
    assert found == {"text": ["a ", "b"]}


def test_several_outputs_are_labelled_and_never_share_a_line(tmp_path: Path) -> None:
    text, found = shown(
        tmp_path, {"heard": TEXT, "text": TOKENS}, ("text", "a "), ("heard", "what?"), ("text", "b")
    )  # fmt: skip
    assert text == "text: a \nheard: what?\ntext: b\n"
    assert found == {"heard": "what?", "text": ["a ", "b"]}


def test_an_absent_output_says_nothing(tmp_path: Path) -> None:
    assert shown(tmp_path, {"text": TEXT}, ("text", ABSENT)) == ("", {})


def test_other_values_are_printed_as_json(tmp_path: Path) -> None:
    outputs = {"a": Kind(Json(), False), "b": Kind(Record(Point), False), "c": Kind(Record(Place), True)}
    text, _ = shown(tmp_path, outputs, ("a", {"k": [1, None]}), ("b", Point(1)), ("c", Place(name="Kiel")))
    assert text == 'a: {"k":[1,null]}\nb: {"x":1}\nc: {"name":"Kiel"}\n'


def test_sound_grows_in_one_file_and_its_place_is_said(tmp_path: Path) -> None:
    chunk = np.full(4_000, 0.5, np.float32)
    text, found = shown(tmp_path, {"speech": SOUND}, ("speech", chunk), ("speech", chunk))
    path = tmp_path / "out" / "speech.wav"
    assert text == f"speech: 1.0 s of sound in {path}\n"
    assert found == {"speech": {"file": str(path), "seconds": 1.0, "rate": 8_000}}
    assert soundfile.info(path).frames == 8_000


def test_a_collected_list_of_sounds_is_one_file(tmp_path: Path) -> None:
    chunk = np.zeros(800, np.float32)
    _, found = shown(tmp_path, {"speech": Kind(Audio(8_000), False)}, ("speech", [chunk, chunk]))
    assert soundfile.info(tmp_path / "out" / "speech.wav").frames == 1_600
    assert found["speech"] == {"file": str(tmp_path / "out" / "speech.wav"), "seconds": 0.2, "rate": 8_000}


def test_pictures_are_png_files_numbered_if_there_may_be_several(tmp_path: Path) -> None:
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    text, _ = shown(
        tmp_path, {"one": Kind(Image(), False), "many": Kind(Image(), True)},
        ("one", picture), ("many", picture), ("many", picture))  # fmt: skip
    out = tmp_path / "out"
    assert text == f"one: {out}/one.png\nmany: {out}/many-0.png to many-1.png\n"
    assert (read_picture(out / "many-1.png") == picture).all()


def test_arrays_and_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    shown(
        tmp_path, {"a": Kind(Tensor(), False), "b": Kind(Bytes(), True), "c": Kind(Audio(), False)},
        ("a", np.eye(2)), ("b", b"x"), ("b", b"y"), ("c", np.zeros(3, np.float32)))  # fmt: skip
    out = tmp_path / "out"
    assert (np.load(out / "a.npy") == np.eye(2)).all()
    assert (out / "b.bin").read_bytes() == b"xy"
    assert np.load(out / "c.npy").shape == (3,)


def test_a_torch_tensor_is_written_whatever_its_dtype(tmp_path: Path) -> None:
    import torch

    shown(tmp_path, {"a": Kind(Tensor(), False)}, ("a", torch.ones(2, dtype=torch.bfloat16)))
    assert list(np.load(tmp_path / "out" / "a.npy")) == [1, 1]


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match=r"out: File exists\nname a folder with --out"):
        shown(tmp_path, {"a": Kind(Tensor(), False)}, ("a", np.eye(2)))


def test_the_timeline_is_in_order_of_starts_from_the_first_queued() -> None:
    spans = [Span("b", "0", "b/0", 10.0, 10.5, 11.0), Span("a", "", "a/0", 10.0, 10.0, 10.5)]
    assert [(r["interface"], r["queued_s"], r["started_s"], r["ended_s"]) for r in timeline.as_rows(spans)] == [
        ("a", 0.0, 0.0, 0.5),
        ("b", 0.0, 0.5, 1.0),
    ]
    out = io.StringIO()
    timeline.show(spans, out)
    lines = out.getvalue().splitlines()
    assert "1.00 s in all" in lines[0]
    assert lines[1].split() == ["a", "a/0", "0.000", "s", "0.000", "s", "0.500", "s", "█" * 16]
    assert lines[2].split() == ["b[0]", "b/0", "0.000", "s", "0.500", "s", "1.000", "s", "·" * 16 + "█" * 16]


def test_what_roles_said_of_their_activations_stands_below_the_timeline() -> None:
    spans = [Span("a", "", "a/0", 10.0, 10.0, 10.5), Span("b", "0", "b/0", 10.0, 10.5, 11.0, "64 tokens")]
    assert [row["note"] for row in timeline.as_rows(spans)] == ["", "64 tokens"]
    out = io.StringIO()
    timeline.show(spans, out)
    assert out.getvalue().splitlines()[3:] == ["b[0]: 64 tokens"]


def test_a_long_timeline_is_cut() -> None:
    out = io.StringIO()
    timeline.show([Span("a", str(k), "a/0", 0.0, k, k + 1) for k in range(timeline.MOST_ROWS + 5)], out)
    assert out.getvalue().endswith("… 5 more; --json has them all\n")


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_full_disk_is_said_in_words_and_all_files_are_closed(tmp_path: Path, length: int) -> None:
    (tmp_path / "s.wav").symlink_to("/dev/full")
    show = Show({"s": Kind(Audio(16_000), True), "b": Kind(Bytes(), True)}, tmp_path)
    show("b", b"before")

    def all_of_it() -> None:
        show("s", np.zeros(length, np.float32))
        show.finish()

    with pytest.raises(UserError, match="No space left on device"):
        all_of_it()
    with contextlib.suppress(UserError):
        show.finish()
    assert (tmp_path / "b.bin").read_bytes() == b"before"
