"""The sampler against transformers' own processors, naive arithmetic and exact distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni_flow.compute.errors import BadRequest
from omni_flow.compute.sampler import Batch, History, Row, adjust, sample, shape, uniform
from omni_flow.compute.sampling import Sampling

VOCABULARY = 97


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def batch_of(*given: Sampling) -> Batch:
    return Batch(tuple(Row(sampling) for sampling in given))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.6, 0.0),
        (1.3, 20, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.5, 30, 0.9, 0.05),
        (1.0, 1, 0.01, 0.9),
    ],
)
def test_temperature_top_k_top_p_and_min_p_keep_what_transformers_keeps(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_of(8)
    one = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = shape(logits.clone(), batch_of(*[one] * 8).columns(logits.device))
    wanted = TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    if min_p:
        wanted = MinPLogitsWarper(min_p)(None, wanted)
    torch.testing.assert_close(got, wanted)


def test_rows_of_a_batch_do_not_know_each_other() -> None:
    logits = logits_of(6)
    given = [
        Sampling(),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.8, top_k=9, seed=2, frequency_penalty=0.5),
        Sampling(temperature=1.2, top_p=0.7, seed=3),
        Sampling(temperature=1.0, min_p=0.2, seed=2**63 + 5, repetition_penalty=1.3),
        Sampling(temperature=0.3, seed=1, logit_bias={3: 5.0}),
    ]

    def rows() -> list[Row]:
        return [Row(s, history=History([1, 2, 3], [4, 4], VOCABULARY, "cpu") if s.penalised else None) for s in given]

    positions = torch.arange(10, 16)
    together = sample(logits, Batch(tuple(rows())), positions).tokens.tolist()
    alone = [int(sample(logits[i : i + 1], Batch((row,)), positions[i : i + 1]).tokens) for i, row in enumerate(rows())]
    turned = sample(logits.flip(0), Batch(tuple(rows()[::-1])), positions.flip(0)).tokens.tolist()
    assert together == alone == turned[::-1]


def test_a_seed_gives_the_same_tokens_again_and_another_seed_or_position_others() -> None:
    logits = torch.zeros(1, VOCABULARY)

    def draw(seed: int, position: int, stream: int = 0) -> int:
        batch = batch_of(Sampling(temperature=1.0, seed=seed))
        return int(sample(logits, batch, torch.tensor([position]), stream).tokens)

    line = [draw(7, position) for position in range(40)]
    assert line == [draw(7, position) for position in range(40)]
    assert len(set(line)) > 20
    assert line != [draw(8, position) for position in range(40)]
    assert line != [draw(7, position, stream=1) for position in range(40)]


def test_draws_follow_the_distribution() -> None:
    chances = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    draws = 40_000
    rows = 4_000
    counts = torch.zeros(5)
    batch = batch_of(*[Sampling(temperature=1.0, seed=seed) for seed in range(rows)])
    for position in range(draws // rows):
        tokens = sample(chances.log().expand(rows, 5), batch, torch.full((rows,), position)).tokens
        counts += torch.bincount(tokens, minlength=5)
    expected = chances * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 23.5  # 4 degrees of freedom, p = 1e-4; the draws are fixed


def test_uniform_numbers_lie_in_the_open_interval_and_are_even() -> None:
    numbers = uniform(torch.arange(64), torch.arange(64), 1000)
    assert float(numbers.min()) > 0
    assert float(numbers.max()) < 1
    histogram = np.histogram(numbers.numpy(), 20, (0, 1))[0]
    assert abs(histogram - 3200).max() < 300


def test_penalties_are_those_of_transformers_and_openai() -> None:
    logits = logits_of(1)
    prompt, answer = [5, 6, 7], [7, 8, 8]
    history = History(prompt, answer, VOCABULARY, "cpu")
    row = Row(Sampling(repetition_penalty=1.4), history=history)
    got = adjust(logits.clone(), Batch((row,)), torch.tensor([5]))
    wanted = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt + answer]), logits.clone())
    torch.testing.assert_close(got, wanted)
    row = Row(Sampling(frequency_penalty=0.5, presence_penalty=0.25), history=history)
    got = adjust(logits.clone(), Batch((row,)), torch.tensor([5]))
    wanted = logits.clone()
    wanted[0, 7] -= 0.75
    wanted[0, 8] -= 1.25
    torch.testing.assert_close(got, wanted)


def test_chosen_tokens_count_for_the_next_penalty() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 10], logits[0, 11] = 1.0, 0.5
    batch = Batch((Row(Sampling(presence_penalty=2.0), history=History([1], [], VOCABULARY, "cpu")),))
    tokens = [int(sample(logits, batch, torch.tensor([position])).tokens) for position in range(3)]
    assert tokens[:2] == [10, 11]
    assert tokens[2] not in (10, 11)


def test_bad_words_of_one_token_never_come_and_of_several_not_in_sequence() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 10], logits[0, 11], logits[0, 12] = 3.0, 2.0, 1.0
    one = Batch((Row(Sampling(bad_words=((10,),))),))
    assert int(sample(logits, one, torch.tensor([3])).tokens) == 11
    for prompt, wanted in (([1, 2], 11), ([1, 3], 10), ([2], 10)):
        row = Row(Sampling(bad_words=((1, 2, 10),)), history=History(prompt, [], VOCABULARY, "cpu"))
        assert int(sample(logits, Batch((row,)), torch.tensor([3])).tokens) == wanted


def test_an_end_token_comes_only_after_the_least_number_of_tokens() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 2] = 5.0
    batch = Batch((Row(Sampling(min_tokens=2), end_ids=(2,), prompt_tokens=4),))
    chosen = [int(sample(logits, batch, torch.tensor([position])).tokens) == 2 for position in (3, 4, 5)]
    assert chosen == [False, False, True]


def test_bias_and_log_probabilities() -> None:
    logits = logits_of(1)
    batch = batch_of(Sampling(logit_bias={42: 100.0}, logprobs=0))
    chosen = sample(logits, batch, torch.tensor([0]))
    assert int(chosen.tokens) == 42
    assert chosen.logprobs is not None
    torch.testing.assert_close(chosen.logprobs, logits.log_softmax(-1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 3.0),
        ("max_tokens", 0),
        ("min_tokens", 500),
        ("logprobs", 21),
        ("bad_words", ((),)),
        ("bad_words", ((1,) * 34,)),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", 2**70),
        ("top_k", 1.5),
        ("top_p", None),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("seed", 2**64),
        ("seed", "x"),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"1": 2.0}),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop_token_ids", (1.0,)),
        ("regex", 3),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadRequest, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize("given", [{"top_k": VOCABULARY + 1}, {"top_k": 2**31 - 1}, {"top_p": 1e-300, "seed": 3}])
def test_more_tokens_than_there_are_is_all_of_them_and_less_than_one_is_the_most_likely(given: dict[str, Any]) -> None:
    logits = logits_of(4)
    chosen = sample(logits, batch_of(*[Sampling(temperature=1.0, **given)] * 4), torch.arange(4)).tokens
    if "top_k" in given:
        assert chosen.equal(sample(logits, batch_of(*[Sampling(temperature=1.0)] * 4), torch.arange(4)).tokens)
    else:
        assert chosen.equal(logits.argmax(-1))


def test_two_grammars_are_refused() -> None:
    with pytest.raises(BadRequest, match="give one"):
        Sampling(regex="a+", json_schema="{}")
