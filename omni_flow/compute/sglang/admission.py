"""What a request must be before it goes to an engine: everything that the engine process would fall over is refused
here, with the name of the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from omni_flow.compute.engine import Floats, Layout, Request, Span, lay_out
from omni_flow.compute.errors import BadRequest, PromptTooLong
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang.wire import Ready
from omni_flow.data.messages import MAX_NAME

_KINDS: dict[str, type] = {
    "sampling": Sampling,
    "tenant": bytes,
    "logits": bool,
    "hidden": bool,
    "prompt_logprobs": bool,
    "priority": int,
    "session": str,
    "timeline": bool,
    "stream": bool,
}


def admit(request: Request, ready: Ready) -> Layout:
    """A request laid out.

    Raises:
        BadRequest: a field is of the wrong type, or names what the model does not have.
        PromptTooLong: with numbers.
    """
    for name, kind in _KINDS.items():
        require(name, getattr(request, name), kind)
    if request.steps is not None:
        require("steps", request.steps, Mapping)
    if not -(2**63) <= request.priority < 2**63:
        raise BadRequest(f"priority is {request.priority}", "give 64 bits")
    admit_session(request.session)
    layout = admit_prompt("spans", request.spans, ready)
    if len(layout.ids) > ready.max_prompt:
        raise PromptTooLong(
            f"the prompt has {len(layout.ids)} tokens; model and pool take {ready.max_prompt} "
            f"(quota {ready.max_tokens})",
            "shorten it, or raise context or max_tokens",
        )
    sampling = request.sampling
    if sampling.stop and not ready.tokenizer:
        raise BadRequest("sampling.stop has texts and the checkpoint no tokenizer", "give stop_token_ids")
    _in_vocabulary("sampling.logit_bias", sampling.logit_bias, ready)
    _in_vocabulary("sampling.stop_token_ids", sampling.stop_token_ids, ready)
    _in_vocabulary("sampling.bad_words", (token for word in sampling.bad_words for token in word), ready)
    return layout


def admit_session(session: str) -> None:
    """The name of a session. Raises BadRequest: it is none."""
    require("session", session, str)
    if len(session) > MAX_NAME:
        raise BadRequest(f"session has {len(session)} characters", f"give at most {MAX_NAME}")


def admit_prompt(name: str, spans: Sequence[Span], ready: Ready) -> Layout:
    """Spans laid out. Raises BadRequest: they are not what `Request.spans` says, or not of this model."""
    layout = lay_out(spans)
    lowest, highest = int(layout.ids.min()), int(layout.ids.max())
    if lowest < 0 or highest >= ready.vocabulary:
        raise BadRequest(f"{name} has token ids {lowest} to {highest}", f"the vocabulary has {ready.vocabulary}")
    if any(rows.shape[1] != ready.hidden for rows in layout.embeddings):
        raise BadRequest(f"{name} has embeddings of another width", f"the model's hidden size is {ready.hidden}")
    return layout


def admit_rows(rows: int, placeholder: int, tenant: bytes, ready: Ready) -> None:
    """What `Engine.fixed_rows` is given beside the context. Raises BadRequest."""
    require("rows", rows, int)
    require("placeholder", placeholder, int)
    require("tenant", tenant, bytes)
    if not 0 < rows <= ready.max_tokens:
        raise BadRequest(f"{rows} rows", f"give 1 to {ready.max_tokens}, which the pool holds")
    _in_vocabulary("placeholder", [placeholder], ready)


def admit_step(rows: Floats, causal: Sequence[bool] | None, shape: tuple[int, ...]) -> bytes:
    """The flags of a step of fixed rows, as they travel. Raises BadRequest: they or the rows are not of this shape."""
    require("rows", rows, np.ndarray)
    if rows.shape != shape or rows.dtype != np.float32:
        raise BadRequest(f"rows are {rows.dtype} of shape {rows.shape}", f"give float32 {shape}")
    if causal is None:
        return b""
    try:
        flags = bytes(map(bool, causal))
    except (TypeError, ValueError) as wrong:
        raise BadRequest(f"causal is {type(causal).__name__}: {wrong}", "give a flag per row") from None
    if len(flags) != len(rows):
        raise BadRequest(f"causal has {len(flags)} flags for {len(rows)} rows", "give one per row")
    return flags


def require(name: str, value: Any, kind: type) -> None:
    """Raises BadRequest: `value` is of another type."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(f"{name} is {type(value).__name__}", f"give {kind.__name__}")


def _in_vocabulary(name: str, tokens: Iterable[int], ready: Ready) -> None:
    strange = [token for token in tokens if not 0 <= token < ready.vocabulary]
    if strange:
        raise BadRequest(f"{name} has token id {strange[0]}", f"the vocabulary has {ready.vocabulary}")
