"""What an answer of a language model is besides its text: log-probabilities, usage and how it ended.

In the form of OpenAI's API, so that a graph can give them as outputs which the server passes on.
"""

from __future__ import annotations

from typing import Any

from omni_flow.compute.engine import EndEvent, TokenEvent
from omni_flow.models.tokenizer import Processor


def logprobs_of(processor: Processor, event: TokenEvent) -> dict[str, Any]:
    """An entry of `logprobs.content`: a token with its log-probability, and the most likely ones if asked for."""
    assert event.logprob is not None
    top = [_entry(processor, token, logprob) for token, logprob in event.top]
    return {**_entry(processor, event.token, event.logprob), "top_logprobs": top}


def _entry(processor: Processor, token: int, logprob: float) -> dict[str, Any]:
    text = processor.decode([token])
    part = "\ufffd" in text  # of a character: its bytes can't be told from the text
    return {"token": text, "logprob": logprob, "bytes": None if part else list(text.encode())}


def usage_of(end: EndEvent) -> dict[str, int]:
    """Tokens of prompt and answer, and how many of the prompt were found in the cache."""
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.tokens,
        "cached_tokens": end.cached_tokens,
    }
