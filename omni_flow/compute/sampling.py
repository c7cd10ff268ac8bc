"""Sampling parameters of one request. Pure: the arithmetic is in `sampler.py`."""

from __future__ import annotations

from functools import cache
from typing import Final

import msgspec

from omni_flow.compute.errors import BadRequest

LONGEST_WORD: Final = 33
"""Tokens of a bad word: as many as a request's history keeps, and the one that it excludes."""

_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, 1e4),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 20),
}
_MOST_BIAS: Final = 1e6


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a request are chosen and when they end.

    Applied in this order to the logits of a step, in float32: grammar, `logit_bias`, penalties, `bad_words` and
    `min_tokens` (these exclude), `temperature`, `top_k`, `top_p`, `min_p`, draw.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0: all.
        top_p: keep the smallest set of tokens whose probabilities reach p, after `top_k`.
        min_p: keep tokens at least this fraction as likely as the most likely one, after `top_p`.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer (HF).
        frequency_penalty, presence_penalty: subtracted per occurrence, and once, for tokens in the answer (OpenAI).
        logit_bias: token id → added to its logit.
        bad_words: sequences of token ids of which the last never follows the others.
        min_tokens: no end token and none of `stop_token_ids` before this many tokens; a text of `stop` ends it all the
            same.
        max_tokens: at most this many tokens.
        stop_token_ids: end after one of these; it is part of the result.
        stop: end when the text ends with one of these.
        ignore_eos: the model's end token does not end it.
        seed: of the draw. Equal seeds give equal tokens whatever else runs in the batch.
        logprobs: report that many alternatives per token; None: no log-probabilities.
        json_schema, regex, grammar: constrain the text; at most one (a JSON schema, a regular expression, EBNF).

    Raises:
        BadRequest: names the field that is of the wrong type or out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        try:
            msgspec.convert(self, _fields(), from_attributes=True)
        except msgspec.ValidationError as wrong:
            raise BadRequest(f"a parameter of sampling is wrong: {wrong}", "see Sampling") from None
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise BadRequest(f"{name} is {value}", f"give {low} to {high}")
        if self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens is {self.min_tokens}", f"give 0 to {self.max_tokens}, which is max_tokens")
        if self.top_p == 0 or self.repetition_penalty == 0:
            raise BadRequest("top_p and repetition_penalty are over 0", "give 1 to switch them off")
        if any(not 0 < len(word) <= LONGEST_WORD for word in self.bad_words):
            raise BadRequest("bad_words has an empty or a long word", f"give 1 to {LONGEST_WORD} tokens each")
        if any(not -_MOST_BIAS <= bias <= _MOST_BIAS for bias in self.logit_bias.values()):
            raise BadRequest(f"logit_bias is {self.logit_bias}", f"give {-_MOST_BIAS} to {_MOST_BIAS} for each token")
        if "" in self.stop:
            raise BadRequest("stop has an empty text", "leave it out")
        if sum(given is not None for given in (self.json_schema, self.regex, self.grammar)) > 1:
            raise BadRequest("more than one of json_schema, regex and grammar", "give one")

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


@cache
def _fields() -> type[msgspec.Struct]:
    """The fields of `Sampling` alone: constructors of Structs don't look at types."""
    return msgspec.defstruct("Fields", [(field.name, field.type) for field in msgspec.structs.fields(Sampling)])
