"""`omni-flow run`: most in this process, what concerns processes and signals as a command of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from .conftest import Cli

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "voice_vision_chat"
OMNI_FLOW = Path(sys.executable).with_name("omni-flow")

KIT = """
import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np

from omni_flow import Audio, Context, Graph, Text, collect, stream
from omni_flow.control.types import Image


class Kit:
    def words(self, ctx: Context, text: str) -> Iterator[str]:
        for word in text.split():
            if word == "boom":
                raise ValueError("a word that can't be said")
            yield word + ctx.params.after

    async def wait(self, text: str) -> AsyncIterator[str]:
        yield "waiting"
        await asyncio.Event().wait()

    def louder(self, sound):
        return 2 * sound

    def upper(self, line: str) -> str:
        return line.upper()


graph = Graph("kit")
text, sound = graph.placeholder("text", Text), graph.placeholder("sound", Audio(8_000))
forever, line = graph.placeholder("forever", Text), graph.placeholder("line", Text, stream=True)
graph.param("after", str, " ")
kit = graph.role("kit", Kit)
words = kit.interface("words", inputs=[[text]], outputs=[stream("word")])
wait = kit.interface("wait", inputs=[[{"text": forever}]], outputs=[stream("sign")])
louder = kit.interface("louder", inputs=[[sound]], outputs=[{"sound": Audio(8_000)}])
upper = kit.interface("upper", inputs=[[line]], outputs=["line"])
graph.output(words=words.word, sign=wait.sign, sound=louder.sound, lines=upper.line)
"""


@pytest.fixture
def kit(folder: Path) -> Path:
    (folder / "kit.py").write_text(KIT)
    return folder


def command(*args: object) -> list[str]:
    return [str(OMNI_FLOW), "run", *map(str, args)]


def test_text_streams_out_labelled_by_its_output(cli: Cli, kit: Path) -> None:
    result = cli("run", "kit.py", "--text", "one two", "--one-process")
    assert (result.exit_code, result.stdout) == (0, "words: one two \n")


@pytest.mark.parametrize("out", ["kit.py", "kit.py/below"])
def test_a_place_for_files_that_is_none_is_said_before_the_launch(cli: Cli, kit: Path, out: str) -> None:
    result = cli("run", "kit.py", "--text", "one", "--out", out)
    assert result.exit_code == 2
    assert "kit.py is no folder" in result.stderr
    assert "up in" not in result.stderr
    assert result.stdout == ""


def test_text_is_read_from_stdin(cli: Cli, kit: Path) -> None:
    assert cli("run", "kit.py", "--text", "-", "--one-process", stdin="one\ntwo\n").stdout == "words: one two \n"


def test_a_param_is_set_for_the_request(cli: Cli, kit: Path) -> None:
    assert cli("run", "kit.py", "--text", "a b", "--param", "after=!", "--one-process").stdout == "words: a!b!\n"


def test_a_sound_goes_in_at_the_rate_of_its_field_and_comes_out_as_a_file(cli: Cli, kit: Path) -> None:
    soundfile.write("in.wav", np.full(1_600, 0.25, np.float32), 16_000)
    result = cli("run", "kit.py", "--sound", "in.wav", "--one-process", "--out", "here")
    assert (result.exit_code, result.stdout) == (0, "sound: 0.1 s of sound in here/sound.wav\n")
    samples, rate = soundfile.read("here/sound.wav")
    assert (rate, len(samples)) == (8_000, 800)
    assert abs(samples[400] - 0.5) < 0.01


def test_a_streamed_placeholder_is_sent_line_by_line(cli: Cli, kit: Path) -> None:
    Path("lines").write_text("one\ntwo\n")
    assert cli("run", "kit.py", "--line", "lines", "--one-process").stdout == "lines: ONETWO\n"
    assert cli("run", "kit.py", "--line", "-", "--one-process", stdin="three\n").stdout == "lines: THREE\n"


def test_a_wrong_frame_of_a_streamed_placeholder_ends_the_request(cli: Cli, kit: Path) -> None:
    Path("lines").write_bytes(b"\xff")
    result = cli("run", "kit.py", "--line", "lines", "--one-process")
    assert result.exit_code == 2
    assert "error: --line: lines is no UTF-8 text (invalid start byte at byte 0)\n" in result.stderr


TALK = """
from omni_flow import Context, Graph, Text


class Memory:
    def __init__(self):
        self.said = {}

    def say(self, ctx: Context, text: str) -> str:
        if text == "boom":
            raise ValueError("a word that can't be said")
        self.said.setdefault(ctx.session, []).append(text)
        return ", ".join(self.said[ctx.session])


graph = Graph("talk")
text = graph.placeholder("text", Text, required=True)
said = graph.role("memory", Memory).interface("say", inputs=[[text]], outputs=["said"])
graph.output(said=said.said)
"""


def test_what_follows_then_is_the_next_request_of_the_session(cli: Cli, folder: Path) -> None:
    (folder / "talk.py").write_text(TALK)
    args = ("run", "talk.py", "--text", "one", "--one-process", "--then", "--text=two", "--then", "--text", "three")
    assert cli(*args).stdout == "turn 1\none\n\nturn 2\none, two\n\nturn 3\none, two, three\n"
    lines = cli(*args, "--json").stdout.splitlines()
    assert [json.loads(line)["outputs"]["said"] for line in lines] == ["one", "one, two", "one, two, three"]


def test_a_turn_that_fails_is_the_last(cli: Cli, folder: Path) -> None:
    (folder / "talk.py").write_text(TALK)
    result = cli("run", "talk.py", "--text", "boom", "--one-process", "--then", "--text", "two")
    assert result.exit_code == 1
    assert "turn 2" not in result.stdout


def test_each_turn_has_a_folder_for_its_files(cli: Cli, kit: Path) -> None:
    for name, seconds in (("a.wav", 1), ("b.wav", 2)):
        soundfile.write(name, np.zeros(8_000 * seconds, np.float32), 8_000)
    assert cli("run", "kit.py", "--sound", "a.wav", "--one-process", "--then", "--sound", "b.wav").exit_code == 0
    lengths = [len(soundfile.read(f"omni-flow-out/{k}/sound.wav")[0]) for k in (1, 2)]
    assert lengths == [8_000, 16_000]


def test_json_is_one_object_and_nothing_else(cli: Cli, kit: Path) -> None:
    result = cli("run", "kit.py", "--text", "one two", "--json", "--timeline", "--one-process")
    found = json.loads(result.stdout)
    assert (found["outcome"], found["outputs"], found["failures"]) == ("done", {"words": ["one ", "two "]}, {})
    assert [row["interface"] for row in found["timeline"]] == ["kit.words"]


def test_a_request_that_fails_ends_with_1_and_the_cause(cli: Cli, kit: Path) -> None:
    result = cli("run", "kit.py", "--text", "one boom two", "--one-process")
    assert result.exit_code == 1
    assert result.stdout == "words: one \n"
    assert "error: words failed: kit.words: " in result.stderr
    assert "a word that can't be said" in result.stderr


def test_a_deadline_ends_the_request_with_1(cli: Cli, kit: Path) -> None:
    result = cli("run", "kit.py", "--forever", "x", "--deadline", "0.2", "--one-process")
    assert (result.exit_code, result.stdout) == (1, "sign: waiting\n")
    assert "error: the request met its deadline of 0.2 s\n" in result.stderr


def test_each_placeholder_is_a_flag_in_the_help_of_the_target(cli: Cli, kit: Path) -> None:
    text = cli("run", "kit.py", "--help").stdout
    for flag in ("--text", "--sound", "--forever", "--line", "--deadline", "--param", "--replicas", "--out", "--json"):
        assert flag in text
    assert "A text file, or - for stdin, sent line by line." in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["kit.py", "--txet", "x"], "--text"),
        (["kti.py", "--text", "x"], "error: kti.py: no such file or folder\n  did you mean kit.py?\n"),
        (["kit.py"], "error: nothing to send\n  give one or more of --text TEXT, --sound FILE, --forever TEXT"),
        (["kit.py", "--sound", "gone.wav"], "error: gone.wav: no such file\n  check the path\n"),
        (["kit.py", "--text", "x", "--replicas", "kti=2"], "error: --replicas: the graph has no role 'kti'\n"),
        (["kit.py", "--text", "x", "--param", "befor=1"], "error: --param: the graph has no param 'befor'\n"),
        (["kit.py", "--text", "x", "--deadline", "soon"], "--deadline"),
        (["kit.py", "--text", "x", "--then"], "error: nothing to send\n"),
        (["kit.py", "--text", "x", "--then", "--txet", "y"], "--txet"),
        (["kit.py", "--text", "x", "--then", "--text", "x", "--deadline", "soon"], "--deadline"),
        (["kit.py", "--text", "x", "--then", "--sound", "gone.wav"], "error: gone.wav: no such file\n"),
        (["kit.py", "--text", "-", "--then", "--text", "-"], "error: two turns read stdin\n"),
        ([], "TARGET"),
    ],
)
def test_wrong_input_ends_with_2_before_anything_is_launched(
    cli: Cli, kit: Path, args: list[str], message: str
) -> None:
    result = cli("run", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_corrupt_wav_or_picture_for_the_demo_ends_with_2(cli: Cli, folder: Path) -> None:
    (folder / "cut.wav").write_bytes((DEMO / "samples" / "question.wav").read_bytes()[:1_000])
    (folder / "cut.png").write_bytes((DEMO / "samples" / "sign.png").read_bytes()[:1_000])
    sound, picture = cli("run", DEMO, "--speech", "cut.wav"), cli("run", DEMO, "--picture", "cut.png")
    assert sound.exit_code == picture.exit_code == 2
    assert sound.stderr == "error: cut.wav: the file is cut off\n  record or copy it again\n"
    assert picture.stderr.startswith("error: cut.png: damaged picture (")


def test_each_replica_is_a_process_and_the_timeline_names_it(kit: Path) -> None:
    args = command("kit.py", "--text", "one", "--replicas", "kit=2", "--timeline")
    result = subprocess.run(args, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "up in " in result.stderr
    assert "kit ×2" in result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "words: one "
    assert lines[-1].split()[:2] in (["kit.words", "kit/0@0"], ["kit.words", "kit/1@0"])


def test_a_role_that_cannot_start_ends_with_1_and_names_its_line(kit: Path) -> None:
    (kit / "kit.py").write_text(KIT.replace("class Kit:\n", "class Kit:\n    def __init__(self):\n        1 / 0\n\n"))
    result = subprocess.run(command("kit.py", "--text", "x"), capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "role 'kit'" in result.stderr
    assert "ZeroDivisionError" in result.stderr
    assert "Traceback" not in result.stderr


def test_interrupting_cancels_and_leaves_no_process(kit: Path) -> None:
    process = subprocess.Popen(
        command("kit.py", "--forever", "x"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(13) == "sign: waiting"
    os.killpg(process.pid, signal.SIGINT)  # what ^C in a terminal does
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.endswith("error: cancelled\n")
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
