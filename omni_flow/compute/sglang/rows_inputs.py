"""What goes into a forward of fixed rows: tensors that stay where they are, so a captured CUDA graph can read them.

A forward has room for `SEQUENCES` sessions and a fixed number of rows, its *size*. The rows of the sessions follow each
other; the rest are padding, a sequence of its own without a context, whose KV goes to padding page 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

SEQUENCES: Final = 8
"""Sessions of one forward."""

MOST_ROWS: Final = 8192
"""Rows of one forward of several sessions; a session alone may have more."""


class Placed(Protocol):
    """Rows that have places in the KV pool, which stay the same from their first forward on."""

    @property
    def number(self) -> int:
        """No other session's, ever."""

    @property
    def context(self) -> int:
        """Tokens before the rows."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def places(self) -> torch.Tensor:
        """Slots of context and rows, int64 (context + rows,)."""


def size_for(rows: int) -> int:
    """The size that serves so many rows: a multiple of 16, from 64 on at most a quarter more, four sizes an octave."""
    step = max(16, 1 << (rows - 1).bit_length() >> 3)
    return -(-rows // step) * step


def batches(steps: Sequence[tuple[int, int]]) -> list[slice]:
    """Cut steps, (number of the session, rows), in their order into forwards; a session is in each at most once."""
    cuts, total, there = [0], 0, set[int]()
    for at, (number, count) in enumerate(steps):
        if at > cuts[-1] and (at - cuts[-1] == SEQUENCES or total + count > MOST_ROWS or number in there):
            cuts.append(at)
            total = 0
            there.clear()
        total += count
        there.add(number)
    return [slice(*pair) for pair in zip(cuts, [*cuts[1:], len(steps)], strict=True)]


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The tensors of one size.

    Args:
        embeds: (size, hidden size), in the model's type.
        ids: (size,) int64, zeros: SGLang's models ask for token ids beside embeddings.
        positions: (size,) int64.
        slots: (size,) int64, where the KV of each row goes.
        starts: (SEQUENCES + 2,) int64; rows `starts[i]` to `starts[i + 1]` are sequence i's. The last is padding.
        context: int64, slots of the contexts, one after the other; room for SEQUENCES of the longest.
        context_starts: (SEQUENCES + 2,) int32, the same for `context`.
        bounds: per width of a layer's sliding window (-1: none) int32 (3, size). A row sees the keys of its sequence up
            to `bounds[0]`; of these the ones from `bounds[2]` on, where its window begins, and, where it is not
            causal, the ones from `bounds[1]` on, the fixed rows. Keys are counted from the start of the context.
    """

    embeds: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    context: torch.Tensor
    context_starts: torch.Tensor
    bounds: dict[int, torch.Tensor]

    @property
    def size(self) -> int:
        return len(self.ids)

    @classmethod
    def empty(
        cls, size: int, hidden: int, dtype: torch.dtype, windows: Iterable[int], context: torch.Tensor
    ) -> RowInputs:
        """All rows are padding.

        Args:
            context: shared by the inputs of all sizes, of which one is in use at a time.
        """
        import torch

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=context.device)

        made = cls(
            torch.zeros(size, hidden, dtype=dtype, device=context.device),
            ints(size),
            ints(size),
            ints(size),
            ints(SEQUENCES + 2),
            context,
            ints(SEQUENCES + 2, dtype=torch.int32),
            {window: ints(3, size, dtype=torch.int32) for window in windows},
        )
        made.place([], [])
        return made

    def place(self, sessions: Sequence[Placed], causal: Sequence[bytes]) -> None:
        """Say whose rows these are.

        Args:
            sessions: at most SEQUENCES, whose rows fit.
            causal: per session a byte for each row: 1 where it sees the rows up to itself only, 0 where it sees all.
        """
        import torch

        used = sum(session.rows for session in sessions)
        positions, last, fixed = np.zeros((3, self.size), np.int64)
        at = 0
        for session, flags in zip(sessions, causal, strict=True):
            rows = slice(at, at + session.rows)
            end = session.context + session.rows
            positions[rows] = np.arange(session.context, end)
            alone = np.frombuffer(flags, np.bool_)
            last[rows] = np.where(alone, positions[rows], end - 1)
            fixed[rows] = np.where(alone, end, session.context)
            at += session.rows
        self.positions.copy_(torch.from_numpy(positions))
        for window, bounds in self.bounds.items():
            first = np.maximum(positions - window, 0) if window >= 0 else np.zeros_like(positions)
            bounds.copy_(torch.from_numpy(np.stack((last, fixed, first))))
        self.slots[used:] = 0
        if sessions:
            torch.cat([session.places[session.context :] for session in sessions], out=self.slots[:used])
            contexts = [session.places[: session.context] for session in sessions]
            torch.cat(contexts, out=self.context[: sum(len(context) for context in contexts)])
        unused = [0] * (SEQUENCES - len(sessions))
        counts = [session.rows for session in sessions]
        self.starts.copy_(torch.tensor([0, *accumulate([*counts, *unused, self.size - used])]))
        counts = [session.context for session in sessions]
        self.context_starts.copy_(torch.tensor([0, *accumulate([*counts, *unused, 0])]))


class Placement:
    """Which sessions the inputs stand for: a step over the same ones as the last writes their embeddings only.

    It knows sessions by number and keeps none of them.
    """

    def __init__(self) -> None:
        self._last: tuple[int, tuple[int, ...], tuple[bytes, ...]] | None = None

    def set(self, inputs: RowInputs, sessions: Sequence[Placed], causal: Sequence[bytes]) -> None:
        """See `RowInputs.place`."""
        wanted = inputs.size, tuple(session.number for session in sessions), tuple(causal)
        if wanted != self._last:
            self._last = None
            inputs.place(sessions, causal)
            self._last = wanted

    def forget(self) -> None:
        """Something else was placed."""
        self._last = None
