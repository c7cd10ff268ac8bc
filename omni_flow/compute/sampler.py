"""Choosing tokens from logits, for the language head and any other. Needs torch alone; never waits for the device.

The draw is the Gumbel-max trick with noise that is a hash of (seed, position, token): a row's token depends on its own
logits and parameters only, never on the other rows or on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omni_flow.compute.sampling import Sampling

_NEVER = float("-inf")


class History:
    """The tokens of one request so far, on the device, for penalties and bad words.

    Args:
        prompt, answer: token ids; ids beyond the vocabulary (placeholders of embeddings) count for nothing.
    """

    def __init__(
        self, prompt: Sequence[int], answer: Sequence[int], vocabulary: int, device: torch.device | str
    ) -> None:
        self.prompt = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.counts = torch.zeros(vocabulary, dtype=torch.int32, device=device)
        known = [token for token in prompt if 0 <= token < vocabulary]
        if known:
            self.prompt[torch.tensor(known, device=device)] = True
        if answer:
            ids = torch.tensor([token for token in answer if 0 <= token < vocabulary], device=device)
            self.counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        tail = (list(prompt) + list(answer))[-32:]
        self.tail = torch.tensor([-1] * (32 - len(tail)) + tail, dtype=torch.int64, device=device)

    def add(self, token: Tensor) -> None:
        """Record a chosen token (a tensor of one element)."""
        self.counts.scatter_add_(0, token.view(1), torch.ones(1, dtype=torch.int32, device=token.device))
        self.tail = torch.cat((self.tail[1:], token.view(1)))


@dataclass(slots=True)
class Row:
    """One row of a batch.

    Args:
        end_ids: tokens that end the request, excluded before `sampling.min_tokens`.
        prompt_tokens: length of the prompt.
        history: needed where `sampling` has penalties or bad words.
        logits, hidden: whether the request wants its logits, its hidden states.
        request, place: of a row with steps, the kernel's request and its row in the kernel's tables.
        partial: the row ends in the middle of a prompt; what is drawn for it is thrown away.
    """

    sampling: Sampling
    end_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    history: History | None = None
    logits: bool = False
    hidden: bool = False
    request: Any = None
    place: int = 0
    partial: bool = False


class Chosen(NamedTuple):
    """Tokens (rows,) int64, and the log-probabilities (rows, vocabulary) of the logits as they came, if asked for."""

    tokens: Tensor
    logprobs: Tensor | None


@dataclass(slots=True)
class _Columns:
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


class Needs(NamedTuple):
    """What the rows of a batch want done, so that a step doesn't ask each of them.

    Args:
        logprobs: of the logits as they came.
        adjust: bias, penalties, bad words or a minimum length.
        draw: some row is not greedy.
        top: some row has top-k or top-p, which need a sort.
        histories: (row, its history) where there is one.
        report: some row wants its logits or hidden states, or has steps.
    """

    logprobs: bool
    adjust: bool
    draw: bool
    top: bool
    histories: tuple[tuple[int, History], ...]
    report: bool


@dataclass(slots=True)
class Batch:
    """The rows of a step. Immutable; what follows from them, and the columns on the device, are made once."""

    rows: tuple[Row, ...]
    _columns: dict[torch.device, _Columns] = field(default_factory=dict)
    _needs: Needs | None = None

    @property
    def needs(self) -> Needs:
        if self._needs is None:
            given = [row.sampling for row in self.rows]
            self._needs = Needs(
                any(s.logprobs is not None for s in given),
                any(s.logit_bias or s.penalised or s.bad_words or s.min_tokens for s in given),
                any(s.temperature != 0 for s in given),
                any(s.temperature > 0 and (s.top_k or s.top_p < 1) for s in given),
                tuple((at, row.history) for at, row in enumerate(self.rows) if row.history is not None),
                any(row.logits or row.hidden or row.request is not None for row in self.rows),
            )
        return self._needs

    def keep(self, at: Sequence[int]) -> Batch:
        """The rows at these places."""
        return Batch(tuple(self.rows[i] for i in at))

    def join(self, other: Batch) -> Batch:
        """These rows, then the others."""
        return Batch(self.rows + other.rows)

    def columns(self, device: torch.device) -> _Columns:
        found = self._columns.get(device)
        if found is None:
            given = [row.sampling for row in self.rows]
            reals = torch.tensor([[s.temperature, s.top_p, s.min_p] for s in given], dtype=torch.float32)
            whole = torch.tensor([[s.top_k, _signed(s.seed)] for s in given], dtype=torch.int64)
            reals, whole = reals.to(device, non_blocking=True), whole.to(device, non_blocking=True)
            found = _Columns(reals[:, 0], whole[:, 0], reals[:, 1], reals[:, 2], whole[:, 1])
            self._columns[device] = found
        return found


def _signed(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64, with logical shifts."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform(seed: Tensor, position: Tensor, size: int, stream: int = 0) -> Tensor:
    """Numbers in (0, 1) that depend on (seed, position, stream, column) only.

    Args:
        seed, position: (rows,) int64.
        size: columns.
        stream: another head of the same position takes another number.

    Returns:
        float32 (rows, size).
    """
    golden = -7046029254386353131
    base = _mix(_mix(seed + golden) + position * golden + _signed(stream * 0xD1342543DE82EF95))
    column = torch.arange(1, size + 1, device=seed.device, dtype=torch.int64) * golden
    bits = _mix(base[:, None] + column[None]) >> 41 & 0x7FFFFF
    return (bits.float() + 0.5) * (2.0**-23)


def adjust(logits: Tensor, batch: Batch, positions: Tensor) -> Tensor:
    """Bias, penalties, bad words and minimum length.

    Args:
        logits: (rows, vocabulary) float32; changed in place.
        positions: (rows,) int64, where the last token of each sequence stands.
    """
    for at, row in enumerate(batch.rows):
        sampling, history = row.sampling, row.history
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
            logits[at, ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
        if history is not None and sampling.penalised:
            line = logits[at]
            seen = history.prompt | (history.counts > 0)
            scaled = torch.where(line > 0, line / sampling.repetition_penalty, line * sampling.repetition_penalty)
            line = torch.where(seen, scaled, line)
            line -= sampling.frequency_penalty * history.counts + sampling.presence_penalty * (history.counts > 0)
            logits[at] = line
        for word in sampling.bad_words:
            if len(word) == 1:
                logits[at, word[0]] = _NEVER
            elif history is not None:
                before = torch.tensor(word[:-1], device=logits.device)
                follows = (history.tail[-len(before) :] == before).all()
                logits[at, word[-1]] = torch.where(follows, _NEVER, logits[at, word[-1]])
        if sampling.min_tokens and row.end_ids:
            early = positions[at] + 1 - row.prompt_tokens < sampling.min_tokens
            ids = torch.tensor(row.end_ids, device=logits.device)
            logits[at, ids] = torch.where(early, _NEVER, logits[at, ids])
    return logits


def shape(logits: Tensor, columns: _Columns, top: bool = True) -> Tensor:
    """Temperature, top-k, top-p and min-p: excluded tokens become -inf. Rows at temperature 0 keep their logits.

    Args:
        top: some row has top-k or top-p (they need a sort).
    """
    heat = columns.temperature[:, None]
    logits = torch.where(heat > 0, logits / heat.clamp(min=1e-6), logits)
    if top:
        ordered, order = logits.sort(-1, descending=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        limit = columns.top_k[:, None]
        out = (limit > 0) & (rank[None] >= limit)
        # ties at the border of top-k stay, as nothing tells them apart
        border = ordered.gather(-1, (limit - 1).clamp(0, logits.shape[-1] - 1))
        out &= ordered < border
        ordered = ordered.masked_fill(out, _NEVER)
        chances = ordered.softmax(-1)
        before = chances.cumsum(-1) - chances
        nucleus = columns.top_p[:, None].clamp(min=1e-30)  # one too small for float32 keeps the most likely token
        ordered = ordered.masked_fill((nucleus < 1) & (before >= nucleus), _NEVER)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    least = columns.min_p[:, None]
    peak = logits.max(-1, keepdim=True).values
    return logits.masked_fill((least > 0) & (logits < peak + least.clamp(min=1e-30).log()), _NEVER)


def sample(logits: Tensor, batch: Batch, positions: Tensor, stream: int = 0) -> Chosen:
    """Choose one token per row.

    Args:
        logits: (rows, vocabulary); grammar masks are applied already. Not changed.
        positions: (rows,) where the last token of each sequence stands.
        stream: which head this is, 0 for the language head.
    """
    needs = batch.needs
    logprobs = torch.log_softmax(logits.float(), -1) if needs.logprobs else None
    if needs.adjust:
        logits = adjust(logits.float().clone(), batch, positions)
    if not needs.draw:
        tokens = logits.argmax(-1)
    else:
        columns = batch.columns(logits.device)
        shaped = shape(logits.float(), columns, needs.top)
        noise = -(-uniform(columns.seed, positions.long(), logits.shape[-1], stream).log()).log()
        greedy = columns.temperature[:, None] == 0
        tokens = torch.where(greedy, logits.float(), shaped + noise).argmax(-1)
    for at, history in needs.histories:
        history.add(tokens[at])
    return Chosen(tokens, logprobs)
