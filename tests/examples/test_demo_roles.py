"""The four roles of the demo with their real weights on the sample files."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soxr
from transformers import AutoTokenizer
from voice_vision_chat import weights
from voice_vision_chat.asr import Whisper
from voice_vision_chat.llm import SmolLM2
from voice_vision_chat.ocr import RapidOcr
from voice_vision_chat.tts import RATE, Hibari

from omni_flow.cli.media import read_picture, read_sound
from omni_flow.compute.errors import PromptTooLong
from omni_flow.models.tokenizer import ChatMessage
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


class Llm:
    """The language model on an event loop that turns only while something is asked."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner, self.role = runner, SmolLM2()

    def all(self, *questions: str, seen: str | None = None, **given: Any) -> list[list[str]]:
        """The pieces of the answers to questions asked at the same time."""

        async def one(question: str) -> list[str]:
            answer = self.role.chat(turn(**given), question, seen)
            return [said.values["token"] async for said in answer if "token" in said.values]

        async def together() -> list[list[str]]:
            return await asyncio.gather(*map(one, questions))

        return self.runner.run(together())

    def __call__(self, question: str, **given: Any) -> str:
        return "".join(self.all(question, **given)[0])


def turn(seed: int = 7, **params: Any) -> Any:
    given = SimpleNamespace(**{"max_tokens": 96, **params})
    return SimpleNamespace(
        session=None, tenant="", params=given, seed=seed, progress=lambda *_: None, prefix=lambda *_: None,
        lineage=0, advance=lambda _: None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> Iterator[Llm]:
    with asyncio.Runner() as runner:
        made = Llm(runner)
        runner.run(made.role.setup())
        runner.run(made.role.warm_up())
        yield made
        runner.run(made.role.close())


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


def test_the_answer_is_sensible_and_comes_in_pieces(llm: Llm) -> None:
    [pieces] = llm.all("What is the capital of France?")
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 4
    assert all(pieces)


def test_the_answer_uses_what_the_picture_says(llm: Llm) -> None:
    assert "12" in llm("How much is a ticket?", seen=SIGN)


def test_at_the_end_the_usage_and_the_reason_are_said_and_log_probabilities_where_asked_for(llm: Llm) -> None:
    async def everything(**params: Any) -> list[dict[str, Any]]:
        return [dict(said.values) async for said in llm.role.chat(turn(max_tokens=5, **params), "Count to ten.")]

    *said, end = llm.runner.run(everything(logprobs=2))
    assert [len(one["logprobs"]["top_logprobs"]) for one in said if "logprobs" in one] == [2] * 5
    assert (end["usage"]["completion_tokens"], end["finish"]) == (5, "length")
    assert not any("logprobs" in one for one in llm.runner.run(everything()))


def test_a_generator_that_is_closed_computes_no_further(llm: Llm) -> None:
    async def closed() -> int:
        answer = llm.role.chat(turn(), "Why is the sky blue?")
        await anext(answer)
        await answer.aclose()
        async with asyncio.timeout(30):
            while running := (await llm.role.engine.stats())["running"]:
                pass
        return running

    assert llm.runner.run(closed()) == 0


def test_answers_at_once_equal_those_alone(llm: Llm) -> None:
    questions = ("Why is the sky blue?", "What is the capital of France?")
    alone = [llm.all(question, max_tokens=16)[0] for question in questions]
    assert llm.all(*questions, max_tokens=16) == alone


def test_sampling_depends_on_the_seed_alone(llm: Llm) -> None:
    def answer(seed: int) -> str:
        return llm("Tell me a story.", seed=seed, temperature=1.0, max_tokens=12)

    first = answer(1)
    assert answer(1) == first
    assert {answer(2), answer(3)} != {first}


def test_a_character_of_several_tokens_comes_whole(llm: Llm) -> None:
    assert not any("\ufffd" in piece for piece in llm.all("Repeat exactly this: 日本語 😀")[0])


def test_a_prompt_over_the_limit_is_refused_with_the_numbers(llm: Llm) -> None:
    with pytest.raises(PromptTooLong, match=r"the prompt has 5\d{3} tokens; model and pool take 4\d{3}"):
        llm("word " * 5_000)


def test_the_tokens_of_a_conversation_are_those_of_transformers(llm: Llm) -> None:
    oracle = AutoTokenizer.from_pretrained(weights.smollm2(), local_files_only=True)
    messages: list[ChatMessage] = [
        {"role": "user", "content": "Grüß dich 🙂\n Wie geht's?"},
        {"role": "assistant", "content": "Good."},
        {"role": "user", "content": "x = 12345"},
    ]
    for count in (1, 3):
        expected = oracle.apply_chat_template(messages[:count], add_generation_prompt=True, return_dict=False)
        assert list(llm.role.processor.chat(messages[:count]).ids) == expected


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
        (SmolLM2(), lambda role: asyncio.run(anext(role.chat(turn(), "Hello")))),
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
import asyncio, sys, threading
sys.path.insert(0, sys.argv[1])
from voice_vision_chat.asr import Whisper
from voice_vision_chat.llm import SmolLM2
from voice_vision_chat.ocr import RapidOcr
from voice_vision_chat.tts import Hibari
for role in (Whisper(), RapidOcr(), Hibari()):
    role.setup()
    role.warm_up()
    role.close()
    print(type(role).__name__, [t.name for t in threading.enumerate()])

async def llm():
    role = SmolLM2()
    await role.setup()
    await role.close()

asyncio.run(llm())
print("SmolLM2", [t.name for t in threading.enumerate()])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(EXAMPLES)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{name} ['MainThread']" for name in ("Whisper", "RapidOcr", "Hibari", "SmolLM2")
    ]
