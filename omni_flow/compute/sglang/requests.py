"""A request of `wire.py` as SGLang's front would send it."""

from __future__ import annotations

from array import array
from typing import Any

from omni_flow.compute.prefix import PageChain
from omni_flow.compute.sglang.fixed_rows import embeddings
from omni_flow.compute.sglang.takeover import current
from omni_flow.compute.sglang.wire import Generate
from omni_flow.data.identity import MediaDigest, MediaSpan


class Endless:
    """A tokenizer without an end token. SGLang's own `ignore_eos` would ignore the request's stop tokens as well."""

    eos_token_id = None
    additional_stop_token_ids = None

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def rid_of(number: int) -> str:
    """SGLang's name of a request. Of fixed width: SGLang aborts every request whose name begins with the one given."""
    return f"{number:016x}"


def sampling_params(message: Generate) -> Any:
    """SGLang's parameters: what ends a request and what constrains it. The choice of tokens is ours."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    given = message.sampling
    return SamplingParams(
        max_new_tokens=given.max_tokens,
        temperature=given.temperature,
        stop=list(given.stop) or None,
        stop_token_ids=set(given.stop_token_ids) or None,
        json_schema=given.json_schema,
        regex=given.regex,
        ebnf=given.grammar,
        min_new_tokens=0,
    )


def to_sglang(message: Generate) -> Any:
    """The request as SGLang's front would send it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    logprobs = message.sampling.logprobs
    return TokenizedGenerateReqInput(
        rid=rid_of(message.number),
        input_text=None,
        input_ids=array("q", message.ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling_params(message),
        return_logprob=logprobs is not None or message.prompt_logprobs,
        logprob_start_len=0 if message.prompt_logprobs else -1,
        top_logprobs_num=logprobs or 0,
        token_ids_logprob=None,
        stream=message.stream,
        priority=message.priority,
        positional_embed_overrides=embeddings(message.media) if message.media else None,
    )


def chain_for(message: Generate) -> PageChain:
    """An empty chain for the pages of a request."""
    media = [MediaSpan(m.start, m.length, MediaDigest(m.digest)) for m in message.media]
    return PageChain(current().root_of(message.tenant), media)
