"""What a role may ask of a running engine: one engine with a tiny DeepSeek-V2 serves all tests of this file."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import engine_kit as kit
import numpy as np
import pytest
from engine_kit import Serving

from omni_flow.compute.engine import Embeddings, EndEvent, Request, TokenEvent, Tokens
from omni_flow.compute.errors import BadRequest, EngineFull, PromptTooLong
from omni_flow.compute.sampler import Batch, History, Row, sample
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.data.identity import MediaDigest, media_digest
from omni_flow.models.tokenizer import Processor
from omni_flow.testing import tiny_checkpoint

EBNF = 'root ::= "<" letter letter ">"\nletter ::= "x" | "y"'
PAGE, QUOTA, CONTEXT = 16, 64, 600


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tiny_checkpoint("deepseek_v2", tmp_path_factory.mktemp("model"))
    config = EngineConfig(
        model=str(folder), page_size=PAGE, max_tokens=QUOTA * PAGE, max_running=4, max_waiting=8, chunk=32, hidden=True,
        context=CONTEXT,
    )  # fmt: skip
    engine = SGLangEngine(config)
    with asyncio.Runner() as loop:
        loop.run(engine.start())
        yield Serving(engine, folder, loop)
        loop.run(engine.close())


@pytest.fixture(scope="module")
def oracle(serving: Serving) -> Any:
    return kit.oracle(serving.folder)


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, length)]


def ask(prompt: list[int], **given: Any) -> Request:
    given.setdefault("max_tokens", 12)
    given.setdefault("ignore_eos", True)
    return Request(spans=[Tokens(prompt)], sampling=Sampling(**given))


def test_equal_seeds_give_equal_tokens_alone_and_in_any_batch(serving: Serving) -> None:
    async def run() -> None:
        asked = [
            ask(prompt_of(9, 1), temperature=1.5, seed=seed, top_p=0.95, frequency_penalty=penalty)
            for seed, penalty in ((1, 0.0), (2, 0.0), (3, 1.0), (1, 1.0))
        ]
        together = [one.tokens for one in await asyncio.gather(*(kit.answer(serving.engine, one) for one in asked))]
        alone = [(await kit.answer(serving.engine, one)).tokens for one in reversed(asked)][::-1]
        assert together == alone
        assert len({tuple(one) for one in together}) >= 3

    serving.run(run())


WARM = {"temperature": 1.2, "seed": 5}
STOPS = tuple(range(0, 256, 3))
PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.4, "seed": 5},
    "seed": {**WARM, "seed": 2**63 + 6},
    "top_k": {**WARM, "top_k": 2},
    "top_p": {**WARM, "top_p": 0.3},
    "min_p": {**WARM, "min_p": 0.5},
    "repetition_penalty": {**WARM, "repetition_penalty": 1.9},
    "frequency_penalty": {"temperature": 0.2, "seed": 5, "frequency_penalty": 2.0},
    "presence_penalty": {"temperature": 0.2, "seed": 5, "presence_penalty": 2.0},
    "logit_bias": {**WARM, "logit_bias": {17: 9.0, 200: 9.5}},
    "min_tokens": {"stop_token_ids": STOPS, "min_tokens": 12},
}


def test_each_parameter_chooses_in_a_mixed_batch_what_the_sampler_chooses_from_the_oracles_logits(
    serving: Serving, oracle: Any
) -> None:
    import torch

    prompt, count = prompt_of(37, 70), 12
    whole = {"warm": WARM, "greedy": {}, "cool": {"temperature": 0.2, "seed": 5}} | PARAMETERS

    async def run() -> dict[str, list[int]]:
        asked = [kit.answer(serving.engine, ask(prompt, max_tokens=count, **given)) for given in whole.values()]
        got = await asyncio.gather(*asked[:8]), await asyncio.gather(*asked[8:])
        return dict(zip(whole, (one.tokens for part in got for one in part), strict=True))

    got = serving.run(run())
    for name, given in whole.items():
        sampling = ask(prompt, max_tokens=count, **given).sampling
        with torch.inference_mode():
            lines = oracle(torch.tensor([prompt + got[name]])).logits[0, len(prompt) - 1 : -1]
        for at, token in enumerate(got[name]):
            row = Row(sampling, sampling.stop_token_ids, len(prompt), History(prompt, got[name][:at], 258, "cpu"))
            place = torch.tensor([len(prompt) + at - 1])
            assert token == int(sample(lines[at : at + 1], Batch((row,)), place).tokens), (name, at)
    # and each made a difference
    plain = {"frequency_penalty": "cool", "presence_penalty": "cool", "min_tokens": "greedy"}
    assert [name for name in PARAMETERS if got[name] == got[plain.get(name, "warm")]] == []


def test_bad_words_of_several_tokens_never_come_in_sequence(serving: Serving) -> None:
    async def run() -> None:
        prompt = prompt_of(10, 9)
        free = (await kit.answer(serving.engine, ask(prompt))).tokens
        word = tuple(free[4:7])
        without = (await kit.answer(serving.engine, ask(prompt, bad_words=(word,)))).tokens
        assert without[:6] == free[:6]
        assert all(tuple(without[at : at + 3]) != word for at in range(len(without)))

    serving.run(run())


def test_log_probabilities_are_those_of_the_oracle(serving: Serving, oracle: Any) -> None:
    import torch

    prompt = prompt_of(40, 2)
    request = Request(
        spans=[Tokens(prompt)], sampling=Sampling(max_tokens=5, ignore_eos=True, logprobs=3), prompt_logprobs=True
    )
    got = serving.run(kit.answer(serving.engine, request))
    tokens, logits = kit.oracle_greedy(oracle, prompt, 5)
    assert got.tokens == tokens
    lines = torch.tensor(logits).log_softmax(-1)
    for event, line in zip(got.events, lines, strict=True):
        assert event.logprob == pytest.approx(float(line.max()), abs=1e-4)
        best = line.topk(3)
        assert [token for token, _ in event.top] == best.indices.tolist()
        assert [value for _, value in event.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    with torch.inference_mode():
        whole = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = [float(whole[at, token]) for at, token in enumerate(prompt[1:])]
    assert list(got.end.prompt_logprobs) == pytest.approx(wanted, abs=1e-4)


def test_hidden_states_are_those_that_the_head_reads(serving: Serving, oracle: Any) -> None:
    import torch

    prompt = prompt_of(20, 3)
    request = Request(spans=[Tokens(prompt)], sampling=Sampling(max_tokens=3, ignore_eos=True), hidden=True)
    got = serving.run(kit.answer(serving.engine, request))
    with torch.inference_mode():
        ids = torch.tensor([prompt + got.tokens[:-1]])
        states = oracle.model(ids).last_hidden_state[0, len(prompt) - 1 :]
    hidden = np.stack([event.hidden for event in got.events if event.hidden is not None])
    np.testing.assert_allclose(hidden, states.numpy(), rtol=1e-4, atol=1e-4)


def test_embeddings_in_a_prompt_give_what_their_tokens_give_and_are_cached_by_digest(
    serving: Serving, oracle: Any
) -> None:
    prompt = prompt_of(70, 4)
    rows = oracle.model.embed_tokens.weight.detach().numpy()[prompt[10:50]]

    def spans(digest: bytes, rows: Any = rows) -> Request:
        middle = Embeddings(rows, media_digest(digest, "", "test", ""), placeholder=0)
        return Request(
            spans=[Tokens(prompt[:10]), middle, Tokens(prompt[50:])], sampling=Sampling(max_tokens=6, ignore_eos=True)
        )

    async def run() -> None:
        expected = kit.oracle_greedy(oracle, prompt, 6)[0]
        first = await kit.answer(serving.engine, spans(b"one"))
        again = await kit.answer(serving.engine, spans(b"one"))
        assert first.tokens == again.tokens == expected
        assert (first.end.cached_tokens, again.end.cached_tokens) == (0, 64)
        other = await kit.answer(serving.engine, spans(b"two", rows[::-1].copy()))
        assert other.end.cached_tokens == 0
        assert other.tokens != expected
        with pytest.raises(BadRequest, match="hidden size is 64"):
            await kit.answer(serving.engine, spans(b"x", np.zeros((3, 8), np.float32)))

    serving.run(run())


def test_tenants_do_not_share_pages(serving: Serving) -> None:
    prompt = prompt_of(40, 5)

    async def run() -> list[int]:
        asked = [kit.greedy(prompt, 2, tenant=tenant) for tenant in (b"a", b"a", b"b", b"b")]
        return [(await kit.answer(serving.engine, one)).end.cached_tokens for one in asked]

    assert serving.run(run()) == [0, 32, 0, 32]


def test_a_request_ends_at_its_stop_token_text_or_length(serving: Serving) -> None:
    prompt = prompt_of(12, 6)
    processor = Processor(serving.folder)

    async def run() -> None:
        whole = (await kit.answer(serving.engine, ask(prompt, max_tokens=30))).tokens
        stop = next(token for at, token in enumerate(whole) if at >= 4 and token not in whole[:at])
        upto = whole.index(stop) + 1
        got = await kit.answer(serving.engine, ask(prompt, max_tokens=30, stop_token_ids=(stop,)))
        assert (got.tokens, got.end.reason) == (whole[:upto], "stop")
        got = await kit.answer(serving.engine, ask(prompt, max_tokens=30, stop_token_ids=(stop,), min_tokens=upto + 3))
        assert len(got.tokens) >= upto + 3
        assert got.tokens[: upto - 1] == whole[: upto - 1]
        assert stop not in got.tokens[: upto + 3]
        text = processor.decode(whole)
        end = next(text[at : at + 2] for at in range(6, 20) if text[at : at + 2].isascii())
        got = await kit.answer(serving.engine, ask(prompt, max_tokens=30, stop=(end,)))
        assert got.end.reason == "stop"
        assert processor.decode(got.tokens).endswith(end)
        got = await kit.answer(serving.engine, ask(prompt, max_tokens=3))
        assert (got.tokens, got.end.reason) == (whole[:3], "length")

    serving.run(run())


def test_who_does_not_stream_gets_the_same_answer_at_its_end(serving: Serving) -> None:
    async def running_at_the_first_token(request: Request) -> int:
        events = serving.engine.generate(request)
        await anext(events)
        running = (await serving.engine.stats())["running"]
        assert [event async for event in events]
        return running

    asked = [ask(prompt_of(20, 1), max_tokens=count, logprobs=2) for count in (40, 130)]
    serving.run(kit.answer(serving.engine, asked[0]))  # so that both that are compared find a page
    for request in asked:
        streamed = serving.run(kit.answer(serving.engine, request))
        whole = serving.run(kit.answer(serving.engine, replace(request, stream=False)))
        assert whole.events == streamed.events
        assert whole.end.tokens == streamed.end.tokens
    assert serving.run(running_at_the_first_token(replace(asked[0], stream=False))) == 0
    some = replace(asked[0], stream=False, logits=True)
    assert len(serving.run(kit.answer(serving.engine, some)).logits) == 40


def test_grammars_constrain_the_text_and_nobody_elses(serving: Serving) -> None:
    processor = Processor(serving.folder)
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "blue"]}},
        "required": ["ok", "colour"],
        "additionalProperties": False,
    }

    async def run() -> None:
        prompt = prompt_of(8, 7)
        free = ask(prompt, max_tokens=10)
        grammars = [{"regex": "(ab|cd){3}[0-9]{4}"}, {"json_schema": json.dumps(schema)}, {"grammar": EBNF}]
        blank = {token: -100.0 for token in range(256) if processor.decode([token]).isspace()}
        asked = [ask(prompt, max_tokens=80, ignore_eos=False, logit_bias=blank, **given) for given in grammars]
        warm = ask(prompt, max_tokens=80, ignore_eos=False, temperature=1.5, seed=3, **grammars[0])
        got = await asyncio.gather(*(kit.answer(serving.engine, one) for one in (free, *asked, warm)))
        assert [one.end.reason for one in got] == ["length", "stop", "stop", "stop", "stop"]
        other, regex, made, ebnf, drawn = (processor.decode(one.tokens) for one in got)
        assert other == processor.decode((await kit.answer(serving.engine, free)).tokens)
        assert re.fullmatch("(ab|cd){3}[0-9]{4}", regex)
        assert re.fullmatch("(ab|cd){3}[0-9]{4}", drawn)
        answer = json.loads(made)
        assert set(answer) == {"ok", "colour"}
        assert isinstance(answer["ok"], bool)
        assert answer["colour"] in ("red", "blue")
        assert re.fullmatch("<[xy]{2}>", ebnf)
        with pytest.raises(BadRequest, match="grammar"):
            await kit.answer(serving.engine, ask(prompt, regex="(((", ignore_eos=False))
        assert (await kit.answer(serving.engine, free)).tokens == got[0].tokens

    serving.run(run())


def test_bad_words_and_bias_reach_the_engine(serving: Serving) -> None:
    async def run() -> None:
        prompt = prompt_of(10, 8)
        first = (await kit.answer(serving.engine, ask(prompt))).tokens
        banned = (await kit.answer(serving.engine, ask(prompt, bad_words=((first[0],),)))).tokens
        assert first[0] not in banned
        biased = (await kit.answer(serving.engine, ask(prompt, logit_bias={77: 1000.0}))).tokens
        assert biased == [77] * 12

    serving.run(run())


def test_more_than_the_pool_holds_waits_is_retracted_and_is_still_right(serving: Serving, oracle: Any) -> None:
    async def run() -> None:
        prompts = [prompt_of(100, 40 + at) for at in range(6)]
        got = await asyncio.gather(*(kit.answer(serving.engine, ask(one, max_tokens=200)) for one in prompts))
        for prompt, one in zip(prompts, got, strict=True):
            assert one.tokens[:6] == kit.oracle_greedy(oracle, prompt, 6)[0]
            alone = await kit.answer(serving.engine, ask(prompt, max_tokens=200))
            assert one.tokens == alone.tokens

    serving.run(run())


def test_who_is_sent_back_to_wait_is_not_refused_where_the_queue_is_full(serving: Serving) -> None:
    async def run() -> None:
        # SGLang lets four begin, of which it guesses that they end before their limit; they don't
        endless = {"ignore_eos": False, "logit_bias": {Processor(serving.folder).end_id: -1e6}, "max_tokens": 250}
        long = [kit.answer(serving.engine, ask(prompt_of(20, 50 + at), **endless)) for at in range(4)]
        running = [asyncio.create_task(one) for one in long]
        while (await serving.engine.stats())["running"] < 4:
            assert not any(task.done() for task in running)
        short = [asyncio.create_task(kit.answer(serving.engine, ask([1, 2, at], max_tokens=2))) for at in range(8)]
        while (await serving.engine.stats())["waiting"] <= 8:
            assert not any(task.done() for task in running)
        with pytest.raises(EngineFull):
            await kit.answer(serving.engine, ask([1, 2, 3]))
        urgent = kit.answer(serving.engine, kit.greedy([1, 2, 4], 2, priority=1))
        got = await asyncio.gather(urgent, *running, *short, return_exceptions=True)
        assert [isinstance(one, EngineFull) for one in got] == [False] * 12 + [True]
        assert [len(one.tokens) for one in got[:-1]] == [2] + [250] * 4 + [2] * 7

    serving.run(run())


def test_of_those_that_wait_the_largest_priority_goes_first_and_then_the_earliest(serving: Serving) -> None:
    async def run() -> None:
        order: list[str] = []

        async def started(name: str, priority: int) -> None:
            async for event in serving.engine.generate(kit.greedy(prompt_of(20, 90), 2, priority=priority)):
                if isinstance(event, TokenEvent) and name not in order:
                    order.append(name)

        long = [kit.answer(serving.engine, ask(prompt_of(20, 80 + at), max_tokens=120 + 40 * at)) for at in range(4)]
        running = [asyncio.create_task(one) for one in long]
        while (await serving.engine.stats())["running"] < 4:
            assert not any(task.done() for task in running)
        named = {"first": 0, "second": 0, "high": 5, "high too": 5, "low": -3, "middle": 1}
        await asyncio.gather(*(started(name, priority) for name, priority in named.items()), *running)
        assert order == ["high", "high too", "middle", "first", "second", "low"]

    serving.run(run())


def test_in_a_full_queue_a_larger_priority_takes_the_place_of_the_last_of_the_smallest(serving: Serving) -> None:
    async def run() -> None:
        priorities = [0] * 4 + [2, 2, 1, 1, 2, 2, 2, 2] + [2, 1]
        got = await asyncio.gather(
            *(
                kit.answer(serving.engine, kit.greedy(prompt_of(20, 100 + at), 60, priority=priority))
                for at, priority in enumerate(priorities)
            ),
            return_exceptions=True,
        )
        refused = [at for at, one in enumerate(got) if isinstance(one, EngineFull)]
        assert len(refused) == len(got) - 8
        assert all(len(one.tokens) == 60 for one in got if isinstance(one, kit.Answer))
        assert all(priorities[at] < 2 for at in refused)

    serving.run(run())


def test_what_cannot_run_is_refused_with_numbers(serving: Serving) -> None:
    async def run() -> None:
        longest = serving.engine.ready.max_prompt
        assert CONTEXT - 10 < longest < CONTEXT
        with pytest.raises(PromptTooLong, match=rf"{longest + 1} tokens; model and pool take {longest} "):
            await kit.answer(serving.engine, ask([1] * (longest + 1)))
        assert (await kit.answer(serving.engine, ask(prompt_of(longest, 12), max_tokens=1))).end.tokens == 1
        with pytest.raises(BadRequest, match="the vocabulary has 258"):
            await kit.answer(serving.engine, ask([1, 258]))
        with pytest.raises(BadRequest, match="at least one"):
            await kit.answer(serving.engine, Request(spans=[]))
        many = [kit.answer(serving.engine, ask(prompt_of(20, 60 + at), max_tokens=40)) for at in range(30)]
        got = await asyncio.gather(*many, return_exceptions=True)
        refused = [one for one in got if isinstance(one, EngineFull)]
        served = [one for one in got if isinstance(one, kit.Answer)]
        assert len(refused) + len(served) == 30
        assert refused
        assert len(served) >= 8
        assert all(isinstance(one.end, EndEvent) and len(one.tokens) == 40 for one in served)

    serving.run(run())


PICTURE = Embeddings(np.zeros((2, 64), np.float32), media_digest(b"p", "", "test", ""), 0)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("spans", {"spans": None}),
        ("spans", {"spans": "text"}),
        ("span", {"spans": [[1, 2]]}),
        ("token ids", {"spans": [Tokens(None)]}),  # type: ignore[arg-type]
        ("token ids", {"spans": [Tokens([-1])]}),
        ("embeddings", {"spans": [replace(PICTURE, rows=[[0.0] * 64])]}),
        ("digest", {"spans": [replace(PICTURE, digest=MediaDigest(b"short"))]}),
        ("placeholder", {"spans": [replace(PICTURE, placeholder=1.5)]}),
        ("token ids", {"spans": [replace(PICTURE, placeholder=258)]}),
        ("sampling", {"sampling": {"max_tokens": 3}}),
        ("tenant", {"tenant": "ada"}),
        ("logits", {"logits": 1}),
        ("priority", {"priority": 1.0}),
        ("priority", {"priority": 2**63}),
        ("session", {"session": None}),
        ("stream", {"stream": 0}),
        ("Unicode", {"session": "\ud800"}),
        ("Unicode", {"sampling": Sampling(stop=("\ud800",))}),
        ("logit_bias", {"sampling": Sampling(logit_bias={258: 1.0})}),
        ("stop_token_ids", {"sampling": Sampling(stop_token_ids=(-1,))}),
        ("bad_words", {"sampling": Sampling(bad_words=((1, 10**12),))}),
    ],
)
def test_an_odd_value_is_refused_with_the_name_of_its_field_and_the_engine_serves_on(
    serving: Serving, field: str, given: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest, match=field):
        serving.run(kit.answer(serving.engine, Request(**{"spans": [Tokens([1])], **given})))
    assert len(serving.run(kit.answer(serving.engine, ask([1, 2, 3], max_tokens=2))).tokens) == 2


def test_the_largest_values_that_are_taken_are_served(serving: Serving) -> None:
    extreme = {
        "temperature": 1e4, "top_k": 2**31 - 1, "top_p": 1e-300, "repetition_penalty": 100.0, "min_tokens": 3,
        "stop_token_ids": (0, 257), "logit_bias": {257: -1e6, 0: 1e6}, "bad_words": ((1,) * 33, (2,)), "logprobs": 20,
        "seed": 2**64 - 1, "stop": ("x" * 10_000,),
    }  # fmt: skip
    got = serving.run(kit.answer(serving.engine, ask(prompt_of(20, 3), max_tokens=5, **extreme)))
    assert 3 <= len(got.tokens) <= 5
    longest = serving.run(kit.answer(serving.engine, ask(prompt_of(500, 3), max_tokens=2**31 - 1)))
    assert longest.end.reason == "length"
    assert serving.engine.ready.max_prompt - 500 <= len(longest.tokens) < CONTEXT - 500


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("spans", {"context": None}),
        ("context has token ids", {"context": [Tokens([258])]}),
        ("context has embeddings", {"context": [replace(PICTURE, rows=np.zeros((2, 8), np.float32))]}),
        ("rows", {"rows": 0}),
        ("rows", {"rows": 2.0}),
        ("rows", {"rows": 2**70}),
        ("2147483647 rows", {"rows": 2**31 - 1}),
        ("placeholder", {"placeholder": -1}),
        ("tenant", {"tenant": "ada"}),
    ],
)
def test_an_odd_value_of_fixed_rows_is_refused_by_name(serving: Serving, field: str, given: dict[str, Any]) -> None:
    async def run() -> None:
        asked: dict[str, Any] = {"context": [Tokens([1, 2])], "rows": 4, **given}
        async with serving.engine.fixed_rows(asked.pop("context"), asked.pop("rows"), **asked):
            pass

    with pytest.raises(BadRequest, match=field):
        serving.run(run())
    assert serving.run(serving.idle())["held"] == 0


@pytest.mark.parametrize(
    ("field", "rows", "causal"),
    [
        ("rows", None, None),
        ("rows", np.zeros((4, 64)), None),
        ("causal", np.zeros((4, 64), np.float32), 7),
        ("causal", np.zeros((4, 64), np.float32), [True] * 3),
    ],
)
def test_an_odd_step_of_fixed_rows_is_refused_by_name(serving: Serving, field: str, rows: Any, causal: Any) -> None:
    async def run() -> None:
        async with serving.engine.fixed_rows([Tokens([1, 2])], 4) as session:
            with pytest.raises(BadRequest, match=field):
                await session.step(rows, causal)
            assert (await session.step(np.ones((4, 64), np.float32))).shape == (4, 64)

    serving.run(run())
