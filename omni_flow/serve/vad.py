"""Where speech begins and ends in a stream of samples, by its loudness. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FRAME_S = 0.02
START_FRAMES = 3
"""So many loud frames in a row begin speech: a click does not."""
QUIET = 0.02
"""Root mean square that is loud at the default threshold of 0.5."""

Event = tuple[Literal["started", "stopped"], int]
"""What happened, and at which sample of the whole stream."""


@dataclass(frozen=True, slots=True)
class VadSettings:
    """`threshold` 0 to 1; speech ends after `silence_s` of quiet; `padding_s` before its start belongs to it."""

    threshold: float = 0.5
    silence_s: float = 0.5
    padding_s: float = 0.3


class Vad:
    """Takes samples at `rate` in order."""

    def __init__(self, rate: int, settings: VadSettings) -> None:
        self._size = int(rate * FRAME_S)
        self._rate, self.settings = rate, settings
        self._rest = np.zeros(0, np.float32)
        self._at = 0
        self._loud = self._quiet = 0
        self.speaking = False

    def feed(self, samples: NDArray[np.float32]) -> list[Event]:
        """What happened within these samples, shape (n,)."""
        data = np.concatenate([self._rest, samples]) if len(self._rest) else samples
        events: list[Event] = []
        level = QUIET * 2 * max(self.settings.threshold, 0.01)
        whole = len(data) // self._size
        for frame in data[: whole * self._size].reshape(whole, self._size):
            self._at += self._size
            self._step(float(np.sqrt(np.mean(frame * frame))) >= level, events)
        self._rest = data[whole * self._size :]
        return events

    def _step(self, loud: bool, events: list[Event]) -> None:
        self._loud = self._loud + 1 if loud else 0
        self._quiet = 0 if loud else self._quiet + 1
        if not self.speaking and self._loud >= START_FRAMES:
            self.speaking = True
            padding = int(self.settings.padding_s * self._rate)
            events.append(("started", max(0, self._at - START_FRAMES * self._size - padding)))
        elif self.speaking and self._quiet * FRAME_S >= self.settings.silence_s:
            self.speaking = False
            events.append(("stopped", self._at))
