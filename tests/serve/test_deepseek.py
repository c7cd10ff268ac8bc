"""The two DeepSeek-V2 graphs through HTTP with a tiny checkpoint: their own scripts, and what reaches the engine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from omni_flow.models.tokenizer import Processor
from omni_flow.testing import tiny_checkpoint

from .test_command import Served
from .test_demo import run

EXAMPLES = Path(__file__).parents[2] / "examples"
LLM, SPLIT = "deepseek_v2_llm_only", "deepseek_v2_disaggregated"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("deepseek_v2", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    made = Served(EXAMPLES / LLM, EXAMPLES / SPLIT, "--drain", 1, DEEPSEEK_V2=str(folder))
    yield made
    assert made.stop() == 0


@pytest.fixture
def ai(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def bias(folder: Path, letters: str, by: int) -> dict[str, int]:
    """`logit_bias` for the tokens of some letters."""
    return {str(token): by for token in list(Processor(folder).text(letters).ids)[1:]}


def ask(ai: openai.OpenAI, model: str = LLM, content: str = "Is it so?", **options: Any) -> Any:
    return ai.chat.completions.create(model=model, messages=[{"role": "user", "content": content}], **options)


@pytest.mark.parametrize("model", [LLM, SPLIT])
def test_curl_gets_an_answer_with_its_usage(served: Served, model: str, tmp_path: Path) -> None:
    said = run("bash", str(EXAMPLES / model / "request.sh"), served.url, cwd=tmp_path)
    chunks = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert chunks[-1]["usage"]["prompt_tokens"] > 10
    if model == SPLIT:
        assert '"reused":48' in said
    else:
        assert len(json.loads(said.splitlines()[-1])["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3


@pytest.mark.parametrize(("model", "line"), [(LLM, r"[1-9]\d* of \d+ tokens were cached"), (SPLIT, "found 48 tokens")])
def test_python_sees_the_kv_being_used_again(served: Served, model: str, line: str, tmp_path: Path) -> None:
    said = run(sys.executable, str(EXAMPLES / model / "request.py"), served.url, cwd=tmp_path)
    assert re.search(line, said)


def test_both_graphs_answer_a_conversation_alike(ai: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Who are you?"},
    ]
    one, two = (
        ai.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0)
        for model in (LLM, SPLIT)
    )
    assert one.choices[0].message.content == two.choices[0].message.content
    assert one.usage is not None
    assert two.usage is not None
    tokens = len("?Be brief.\n\nUser: Hi\n\nAssistant: Hello?User: Who are you?\n\nAssistant:")
    assert one.usage.prompt_tokens == two.usage.prompt_tokens == tokens
    assert one.usage.completion_tokens == two.usage.completion_tokens == 12
    assert one.choices[0].finish_reason == two.choices[0].finish_reason == "length"


def test_an_answer_fits_the_schema_that_was_asked_for(ai: openai.OpenAI, folder: Path) -> None:
    blanks = bias(folder, " \t\n\r", -100)  # a random model writes them between the parts of its JSON without end
    form: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
    for seed in range(3):
        answer = ask(ai, response_format=form, temperature=1, seed=seed, max_tokens=400, logit_bias=blanks)
        assert json.loads(answer.choices[0].message.content)["answer"] in ("yes", "no")
        assert answer.choices[0].finish_reason == "stop"


def test_a_seed_gives_the_same_answer_and_n_gives_several(ai: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1, "max_tokens": 16, "n": 2}
    first, again, other = (ask(ai, seed=seed, **options) for seed in (5, 5, 50))
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]
    assert first.usage.completion_tokens == 32


def test_logprobs_are_those_of_the_tokens(ai: openai.OpenAI, folder: Path) -> None:
    only = bias(folder, "a", 100)
    answer = ask(ai, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2, logit_bias=only)
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["a"] * 4
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= entry.top_logprobs[0].logprob for entry in entries)
    assert ask(ai, max_tokens=4).choices[0].logprobs is None


def test_the_engine_stops_at_a_stop_text_and_the_usage_is_known(ai: openai.OpenAI, folder: Path) -> None:
    answer = ask(ai, max_tokens=100, stop=["aaa"], logit_bias=bias(folder, "a", 100))
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("model", "options", "param"),
    [
        (LLM, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (LLM, {"temperature": -1}, "temperature"),
        (LLM, {"temperature": "hot"}, "temperature"),
        (LLM, {"max_tokens": 0}, "max_tokens"),
        (LLM, {"logit_bias": {"a": 1}}, "logit_bias"),
        (LLM, {"top_logprobs": 2}, "top_logprobs"),
        (LLM, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (LLM, {"response_format": {"type": "xml"}}, "response_format.type"),
        (SPLIT, {"response_format": {"type": "json_object"}}, "response_format"),
        (SPLIT, {"presence_penalty": 1}, "presence_penalty"),
        (SPLIT, {"logprobs": True}, "logprobs"),
    ],
)
def test_what_a_graph_cannot_take_is_a_400_by_name(
    ai: openai.OpenAI, model: str, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(ai, model, **options)
    assert caught.value.param == param


@pytest.mark.parametrize("model", [LLM, SPLIT])
@pytest.mark.parametrize(
    ("messages", "place"),
    [("hello", "messages"), ([], "messages"), ([{"role": "user", "content": 5}], "messages[0].content")],
)
def test_a_malformed_conversation_of_a_native_request_is_a_400(
    served: Served, model: str, messages: Any, place: str
) -> None:
    answer = httpx.post(f"{served.url}/v1/graphs/{model}/requests", json={"inputs": {"messages": messages}}, timeout=60)
    assert answer.status_code == 400
    assert place in answer.json()["error"]["message"]


def test_what_only_the_engine_can_tell_is_a_400_and_it_lives_on(ai: openai.OpenAI) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    for model, options, code, part in (
        (LLM, {"logit_bias": {"999999": 1}}, "invalid_input", "the vocabulary has 258"),
        (LLM, {"response_format": wrong}, "invalid_input", "nonsense"),
        (LLM, {"content": "a" * 20_000}, "context_length_exceeded", "the prompt has"),
        (SPLIT, {"content": "a" * 20_000}, "context_length_exceeded", "the prompt has"),
        (LLM, {"content": "a" * 10_000_000}, "context_length_exceeded", "the prompt has 10000000 tokens or more"),
        (SPLIT, {"content": "a" * 10_000_000}, "context_length_exceeded", "the prompt has 10000000 tokens or more"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(ai, model, **options)
        assert caught.value.code == code
        assert part in str(caught.value)
        assert ask(ai, model, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("model", [LLM, SPLIT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "-5"),
        ("max_tokens", "1e400"),
        ("temperature", "NaN"),
        ("temperature", "-1"),
        ("top_p", "7"),
        ("top_p", "0"),
        ("presence_penalty", '"much"'),
        ("logit_bias", '{"99999999": 5}'),
        ("logit_bias", '{"-1": 5}'),
        ("logit_bias", '{"a": 5}'),
        ("stop", "[1]"),
        ("seed", "1.5"),
        ("seed", "1" + "0" * 30),
        ("messages", '[{"role": "user|><|x", "content": "a"}]'),
        ("messages", "[]"),
    ],
)
def test_an_odd_value_is_a_400_that_names_it_and_the_engine_serves_on(
    served: Served, model: str, field: str, value: str
) -> None:
    body = {"model": f'"{model}"', "max_tokens": "2", "messages": '[{"role": "user", "content": "a"}]', field: value}
    text = "{" + ", ".join(f'"{name}": {given}' for name, given in body.items()) + "}"
    url, headers = f"{served.url}/v1/chat/completions", {"content-type": "application/json"}
    answer = httpx.post(url, content=text, headers=headers, timeout=60)
    assert answer.status_code == 400, answer.text
    if value not in ("NaN", "1e400"):  # those are no JSON numbers, and no field is at fault
        assert field.partition("[")[0] in answer.text
    fine = httpx.post(url, content=text.replace(f'"{field}": {value}', f'"{field}": null'), headers=headers, timeout=60)
    if field != "messages":
        assert fine.status_code == 200, fine.text
