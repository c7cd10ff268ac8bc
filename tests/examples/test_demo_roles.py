"""The four roles of the demo with their real weights on the sample files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soxr
from voice_vision_chat.asr import Whisper
from voice_vision_chat.llm import PromptTooLong, SmolLM2
from voice_vision_chat.ocr import RapidOcr
from voice_vision_chat.tts import RATE, Hibari

from omni_flow.cli.media import read_picture, read_sound
from omni_flow.refs import ABSENT

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLES = EXAMPLES / "voice_vision_chat" / "samples"
SIGN = "CITY ZOO\nOpen daily 9 to 17\nTicket: 12 euro"
CTX = SimpleNamespace(seed=7)

pytestmark = pytest.mark.timeout(240)  # the first use on a machine converts the weights of the LLM


def words(text: object) -> list[str]:
    return re.findall(r"[a-z0-9]+", str(text).lower())


@pytest.fixture(scope="module")
def asr() -> Iterator[Whisper]:
    role = Whisper()
    role.setup()
    role.warm_up()
    yield role
    role.close()


@pytest.fixture(scope="module")
def ocr() -> Iterator[RapidOcr]:
    role = RapidOcr()
    role.setup()
    role.warm_up()
    yield role
    role.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[SmolLM2]:
    role = SmolLM2()
    role.setup()
    role.warm_up()
    yield role
    role.close()


@pytest.fixture(scope="module")
def tts() -> Iterator[Hibari]:
    role = Hibari()
    role.setup()
    role.warm_up()
    yield role
    role.close()


def test_speech_recognition_hears_the_sample_questions(asr: Whisper) -> None:
    heard = asr.transcribe(read_sound(SAMPLES / "question.wav", 16_000))
    assert words(heard) == words("What is the capital of France and what is it famous for?")
    heard = asr.transcribe(read_sound(SAMPLES / "picture_question.wav", 16_000))
    assert words(heard) == words("How much is a ticket?")


def test_arrays_that_may_not_be_written_to_are_accepted(asr: Whisper, ocr: RapidOcr) -> None:
    speech, picture = read_sound(SAMPLES / "picture_question.wav", 16_000), read_picture(SAMPLES / "sign.png")
    speech.flags.writeable = picture.flags.writeable = False
    assert words(asr.transcribe(speech)) == words("How much is a ticket?")
    assert ocr.read(picture) == SIGN


@pytest.mark.parametrize("length", [0, 100, 16_000])
def test_silence_is_absent(asr: Whisper, length: int) -> None:
    assert asr.transcribe(np.zeros(length, np.float32)) is ABSENT


def test_speech_of_two_channels_is_refused(asr: Whisper) -> None:
    with pytest.raises(ValueError, match=r"speech has shape \(100, 2\): expected one channel"):
        asr.transcribe(np.zeros((100, 2), np.float32))


def test_the_sign_in_the_sample_picture_is_read(ocr: RapidOcr) -> None:
    assert ocr.read(read_picture(SAMPLES / "sign.png")) == SIGN


@pytest.mark.parametrize("shape", [(200, 300, 3), (1, 1, 3), (3, 500, 3), (500, 3, 3)])
def test_a_picture_without_text_is_absent(ocr: RapidOcr, shape: tuple[int, ...]) -> None:
    assert ocr.read(np.full(shape, 200, np.uint8)) is ABSENT


def test_a_picture_of_another_dtype_is_refused(ocr: RapidOcr) -> None:
    with pytest.raises(ValueError, match=r"picture is float32 of shape \(4, 4, 3\): expected uint8"):
        ocr.read(np.zeros((4, 4, 3), np.float32))


def test_the_answer_is_sensible_and_comes_in_pieces(llm: SmolLM2) -> None:
    pieces = list(llm.chat(CTX, "What is the capital of France?"))
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 4
    assert all(pieces)


def test_the_answer_uses_what_the_picture_says(llm: SmolLM2) -> None:
    assert "12" in "".join(llm.chat(CTX, "How much is a ticket?", SIGN))


def test_a_generator_that_is_closed_computes_no_further(llm: SmolLM2) -> None:
    answer = llm.chat(CTX, "Why is the sky blue?")
    next(answer)
    answer.close()
    assert list(answer) == []


def test_two_answers_at_once_on_changing_threads_equal_those_alone(llm: SmolLM2) -> None:
    questions = ("Why is the sky blue?", "What is the capital of France?")
    alone = [[piece for piece, _ in zip(llm.chat(CTX, q), range(8), strict=False)] for q in questions]
    streams = [llm.chat(CTX, q) for q in questions]
    together: list[list[str]] = [[], []]
    with ThreadPoolExecutor(2) as first, ThreadPoolExecutor(2) as second:
        for turn in range(8):
            pool = first if turn % 2 else second
            pieces = list(pool.map(lambda stream: next(stream, None), streams))
            for answer, piece in zip(together, pieces, strict=True):
                answer.extend([piece] if piece is not None else [])
    assert together == alone


def test_sampling_depends_on_the_seed_alone(llm: SmolLM2) -> None:
    warm = SmolLM2(temperature=1.0, max_tokens=12)
    warm.setup()

    def answer(seed: int) -> str:
        return "".join(warm.chat(SimpleNamespace(seed=seed), "Tell me a story."))

    first = answer(1)
    assert answer(1) == first
    assert {answer(2), answer(3)} != {first}
    warm.close()


def test_a_character_of_several_tokens_comes_whole(llm: SmolLM2) -> None:
    pieces = list(llm.chat(CTX, "Repeat exactly this: 日本語 😀"))
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_over_the_limit_is_refused(llm: SmolLM2) -> None:
    with pytest.raises(PromptTooLong, match="at most 4096 are accepted"):
        next(llm.chat(CTX, "word " * 5_000))


def test_what_is_spoken_is_heard_again(tts: Hibari, asr: Whisper) -> None:
    sentence = [" The", " capital", " of", " France", " is", " **Paris**", "."]
    chunks = list(tts.speak(CTX, sentence))
    assert len(chunks) > 4
    assert all(chunk.dtype == np.float32 and 0 < len(chunk) <= RATE // 4 for chunk in chunks)
    heard = asr.transcribe(soxr.resample(np.concatenate(chunks), RATE, 16_000))
    assert words(heard) == words("The capital of France is Paris.")


def test_the_same_text_and_seed_give_the_same_samples(tts: Hibari) -> None:
    one, two = (np.concatenate(list(tts.speak(CTX, ["Good", " morning", "!"]))) for _ in range(2))
    assert np.array_equal(one, two)


@pytest.mark.parametrize("text", ["", "\n", " **", "1."])
def test_text_without_words_is_no_error(tts: Hibari, text: str) -> None:
    assert all(len(chunk) for chunk in tts.speak(CTX, [text]))


@pytest.mark.parametrize(
    ("role", "call"),
    [
        (Whisper(), lambda role: role.transcribe(np.zeros(10, np.float32))),
        (RapidOcr(), lambda role: role.read(np.zeros((4, 4, 3), np.uint8))),
        (SmolLM2(), lambda role: next(role.chat(CTX, "Hello"))),
        (Hibari(), lambda role: next(role.speak(CTX, ["Hello"]))),
    ],
    ids=["asr", "ocr", "llm", "tts"],
)
def test_a_role_that_is_not_set_up_says_so(role: object, call: object) -> None:
    assert callable(call)
    with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
        call(role)


def test_all_roles_close_without_leaving_a_thread() -> None:
    program = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from voice_vision_chat.asr import Whisper
from voice_vision_chat.llm import SmolLM2
from voice_vision_chat.ocr import RapidOcr
from voice_vision_chat.tts import Hibari
for role in (Whisper(), RapidOcr(), SmolLM2(), Hibari()):
    role.setup()
    role.warm_up()
    role.close()
    print(type(role).__name__, [t.name for t in threading.enumerate()])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(EXAMPLES)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{name} ['MainThread']" for name in ("Whisper", "RapidOcr", "SmolLM2", "Hibari")
    ]
