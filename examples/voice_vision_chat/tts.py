"""Speech synthesis: hibari through ONNX Runtime, at 24 kHz."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omni_flow.control.types import Audio

if TYPE_CHECKING:
    from hibari import Hibari as Engine

RATE = 24_000
Chunk = Annotated[NDArray[np.float32], Audio(RATE)]
_UNSPOKEN = re.compile(r"[*_`#>|~]+")


class Context(Protocol):
    """What `Hibari.speak` reads of the activation's context."""

    @property
    def seed(self) -> int: ...


class Hibari:
    """Speaks a sentence. `threads` CPU threads work on a call; calls may come from several threads."""

    def __init__(self, threads: int = 1, speed: float = 1.0, chunk_s: float = 0.25) -> None:
        """`speed` 0.5 is slow, 2.0 fast; audio comes in chunks of `chunk_s` seconds."""
        self._threads = threads
        self._speed = speed
        self._chunk = max(1, round(chunk_s * RATE))
        self._engine: Engine | None = None

    def setup(self) -> None:
        """Loads the model and the pronunciation rules."""
        from hibari import Hibari as Engine

        self._engine = Engine(threads=self._threads)

    def warm_up(self) -> None:
        """Speaks a word to nobody; loads the pronunciation lexicon."""
        self._loaded()("Hello.", seed=0)

    def close(self) -> None:
        """Frees the model."""
        self._engine = None

    def speak(self, ctx: Context, sentence: Sequence[str]) -> Iterator[Chunk]:
        """The sentence given in pieces of text, spoken: mono samples in [-1, 1] at 24 kHz, chunk after chunk.

        The same text and seed give the same samples. A text without anything to say gives no chunk.
        """
        text = _UNSPOKEN.sub("", "".join(sentence)).strip()
        for part in self._loaded().stream(text, speed=self._speed, seed=ctx.seed):
            samples = np.clip(part, -1.0, 1.0).astype(np.float32)
            for start in range(0, len(samples), self._chunk):
                yield samples[start : start + self._chunk]

    def _loaded(self) -> Any:
        if self._engine is None:
            raise RuntimeError("Hibari has no model: call setup() first, and nothing after close()")
        return self._engine
