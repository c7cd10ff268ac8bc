"""The seam between roles and the kernel that runs a language model: what a role asks, what it gets, how it cancels.

A request is a list of spans: token ids, or embeddings with the digest of the media they were made from. Results are
events in an asynchronous stream. A second kernel implements `Engine` and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from omni_flow.compute.errors import BadRequest
from omni_flow.compute.sampling import Sampling
from omni_flow.data.identity import DIGEST_BYTES, MediaDigest, MediaSpan

if TYPE_CHECKING:
    from types import TracebackType

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A span of token ids."""

    ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A span whose rows enter the model as they are.

    Args:
        rows: float32 (length, hidden size), the output of an encoder.
        digest: of the media and of the encoder (`omni_flow.data.identity.media_digest`); equal digests mean equal rows.
        placeholder: the token id that stands at these positions.
    """

    rows: Floats
    digest: MediaDigest
    placeholder: int

    def __len__(self) -> int:
        return len(self.rows)


Span = Tokens | Embeddings


class Layout(NamedTuple):
    """Spans laid out as one sequence.

    Args:
        ids: int64, a token id per position, placeholders where embeddings stand.
        media: the embedding spans by position.
        embeddings: their rows, in the order of `media`.
    """

    ids: npt.NDArray[np.int64]
    media: tuple[MediaSpan, ...]
    embeddings: tuple[Floats, ...]


def lay_out(spans: Sequence[Span]) -> Layout:
    """
    Raises:
        BadRequest: no tokens at all, spans that are none, token ids that are no integers, or embeddings that are not
            float32 of two dimensions with a digest of their own.
    """
    if isinstance(spans, (str, bytes)) or not isinstance(spans, Sequence):
        raise BadRequest(f"spans are {type(spans).__name__}", "give a list of Tokens and Embeddings")
    parts: list[npt.NDArray[np.int64]] = []
    media: list[MediaSpan] = []
    embeddings: list[Floats] = []
    lengths: dict[bytes, int] = {}
    length = 0
    for span in spans:
        if isinstance(span, Tokens):
            parts.append(_token_ids(span.ids))
        elif isinstance(span, Embeddings):
            _check_embeddings(span)
            if lengths.setdefault(span.digest, len(span)) != len(span):
                raise BadRequest(
                    f"embeddings of {lengths[span.digest]} and of {len(span)} rows have one digest",
                    "a digest stands for one medium, see omni_flow.data.identity.media_digest",
                )
            media.append(MediaSpan(length, len(span), span.digest))
            embeddings.append(span.rows)
            parts.append(np.full(len(span), span.placeholder, np.int64))
        else:
            raise BadRequest(f"a span is {type(span).__name__}", "give Tokens or Embeddings")
        length += len(parts[-1])
    if not length:
        raise BadRequest("a request without tokens", "give at least one")
    return Layout(parts[0] if len(parts) == 1 else np.concatenate(parts), tuple(media), tuple(embeddings))


def _check_embeddings(span: Embeddings) -> None:
    rows = span.rows
    if not isinstance(rows, np.ndarray) or rows.dtype != np.float32 or rows.ndim != 2 or not len(rows):
        what = f"{rows.dtype} of shape {rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise BadRequest(f"embeddings are {what}", "give float32 (length > 0, hidden size)")
    if not isinstance(span.digest, bytes) or len(span.digest) != DIGEST_BYTES:
        raise BadRequest("the digest of embeddings is none", "see omni_flow.data.identity.media_digest")
    if not isinstance(span.placeholder, int):
        raise BadRequest(f"the placeholder of embeddings is {type(span.placeholder).__name__}", "give a token id")


def _token_ids(ids: Sequence[int]) -> npt.NDArray[np.int64]:
    if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1:
        return ids
    try:  # the fastest way that takes no other numbers
        return np.frombuffer(struct.pack(f"{len(ids)}q", *ids), np.int64)
    except (struct.error, TypeError) as error:
        raise BadRequest(f"token ids that are no 64-bit integers: {error}", "give whole numbers") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation.

    Args:
        spans: the prompt.
        sampling: how tokens are chosen and when it ends.
        tenant: separates the caches of tenants; set by the server, never by a client.
        logits, hidden: stream the logits, the hidden states, of each generated position with its token.
        steps: run the engine's step hook for this request, which gets this; None: an ordinary request.
        prompt_logprobs: report the log-probability of each prompt token after the first.
        priority: of those that wait the larger goes first, then the earlier. Where the pool or the queue is full, the
            smallest goes back to wait, or is refused.
        session: whose turn it is, "" nobody's: its KV is kept for the next turn, see `Engine.end_session`.
        timeline: note when it passes which step up to its first token.
        stream: False: tokens come some dozens at a time, the rest at the end, which costs the engine less per step; for
            who waits for the whole answer anyway. With `timeline`, `logits`, `hidden` or `steps` they come one by one.
    """

    spans: Sequence[Span]
    sampling: Sampling = field(default_factory=Sampling)
    tenant: bytes = b""
    logits: bool = False
    hidden: bool = False
    steps: Mapping[str, Any] | None = None
    prompt_logprobs: bool = False
    priority: int = 0
    session: str = ""
    timeline: bool = False
    stream: bool = True


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token.

    Args:
        token: its id.
        logprob: of the token under the unchanged logits, if asked for.
        top: the most likely tokens with their log-probabilities, if asked for.
        logits: float32 (vocabulary,), if asked for.
        hidden: float32 (hidden size,) of the position that chose the token, if asked for.
        emitted: what the step hook emitted with it.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    logits: Floats | None = None
    hidden: Floats | None = None
    emitted: bytes | None = None


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The last event.

    Args:
        reason: `length`, `stop` (an end token, a stop token or a stop text) or `cancelled`.
        prompt_tokens, cached_tokens: tokens of the prompt, and how many of them were not computed again.
        tokens: generated tokens.
        prompt_logprobs: per prompt token after the first, if asked for.
        hits: `cached_tokens` by the tier they were found in: L1, L2, L3.
        marks: (tokens up to there, key of the page that ends there) at some places of the prompt; empty where the
            pages are nobody else's to find.
        timeline: (step, monotonic nanoseconds) up to the first token, if asked for.
    """

    reason: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    prompt_logprobs: tuple[float, ...] = ()
    hits: tuple[int, int, int] = (0, 0, 0)
    marks: tuple[tuple[int, bytes], ...] = ()
    timeline: tuple[tuple[str, int], ...] = ()


Event = TokenEvent | EndEvent


class FixedRows(Protocol):
    """Rows behind a context whose KV is computed again at each step, at the same places.

    `cached`: tokens of the context that were found in the cache.
    """

    cached: int

    async def step(self, rows: Floats, causal: Sequence[bool] | None = None) -> Floats:
        """One forward.

        Args:
            rows: float32 (rows, hidden size), what goes into the model.
            causal: per row whether it sees only the rows before it; None: all rows see each other.

        Returns:
            float32 (rows, hidden size), the hidden states behind the last norm.

        Raises:
            BadRequest: not rows of this session.
            ForwardFailed: the model raised; another step may be tried.
            SessionClosed: it was left.
        """


class Engine(Protocol):
    """A running kernel with one model. All methods belong to the event loop that started it."""

    async def start(self) -> None:
        """Load the model and be ready.

        Raises:
            ComputeError: with what is missing or wrong.
        """

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Token events, then one end event. Closing the iterator early cancels: pages and slots go back at once.

        Raises (from the iterator):
            BadRequest, PromptTooLong: refused at admission; the message names the field.
            ForwardFailed: its step hook raised.
            EngineFull: the queue is full, and nothing of smaller priority waits in it.
            EngineDied: the engine's process ended; nothing of this request is kept.
        """

    def fixed_rows(
        self, context: Sequence[Span], rows: int, *, placeholder: int = 0, tenant: bytes = b""
    ) -> AbstractAsyncContextManager[FixedRows]:
        """Open rows behind a context; leaving gives their pages back.

        Args:
            context: what the rows see, computed once or found in the cache.
            rows: how many.
            placeholder: the token id that stands for a row.

        Raises (on entering):
            BadRequest: more than the model or the pool can hold.
            EngineFull: no room now.
        """

    async def end_session(self, session: str) -> None:
        """A session is over: KV that is only its own is dropped from every tier."""

    async def stats(self) -> Mapping[str, int]:
        """Counts of this moment: running and waiting requests, pages held, pinned, idle and available, and so on."""

    async def close(self) -> None:
        """End the kernel; running requests end with `EngineDied`."""

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
