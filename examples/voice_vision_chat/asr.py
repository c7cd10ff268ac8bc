"""Speech recognition: Whisper tiny (English) through CTranslate2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from omni_flow.control.types import Audio
from omni_flow.refs import ABSENT, Absent

from . import weights

if TYPE_CHECKING:
    from faster_whisper import WhisperModel

RATE = 16_000


class Whisper:
    """Turns one utterance into text. `threads` CPU threads work on a call; calls may come from several threads."""

    def __init__(self, model: str = "tiny", threads: int = 1, beam_size: int = 1) -> None:
        """`model` is "tiny" (the weights in the demo's packages) or a folder with a CTranslate2 Whisper model."""
        self._source = model
        self._threads = threads
        self._beam_size = beam_size
        self._model: WhisperModel | None = None

    def setup(self) -> None:
        """Loads the model. Switches off the monitor thread of progress bars in the process. Raises WeightsMissing."""
        from faster_whisper import WhisperModel
        from tqdm import tqdm

        tqdm.monitor_interval = 0
        folder = weights.whisper() if self._source == "tiny" else self._source
        self._model = WhisperModel(
            str(folder), device="cpu", compute_type="int8", cpu_threads=self._threads, local_files_only=True
        )

    def warm_up(self) -> None:
        """Runs every part of the model once."""
        hum = 0.1 * np.sin(np.arange(RATE, dtype=np.float32) * (2 * np.pi * 220 / RATE))
        self._transcribe(hum.astype(np.float32), skip_silence=False)

    def close(self) -> None:
        """Frees the model."""
        self._model = None

    def transcribe(self, speech: Annotated[NDArray[np.float32], Audio(RATE)]) -> str | Absent:
        """What is said in `speech` (mono samples in [-1, 1] at 16 kHz), or ABSENT when no words are heard.

        Raises ValueError for another shape.
        """
        samples = np.ascontiguousarray(speech, dtype=np.float32)
        if samples.ndim != 1:
            raise ValueError(f"speech has shape {samples.shape}: expected one channel of samples, shape (n,)")
        return self._transcribe(samples, skip_silence=True) or ABSENT

    def _transcribe(self, samples: NDArray[np.float32], skip_silence: bool) -> str:
        if self._model is None:
            raise RuntimeError("Whisper has no model: call setup() first, and nothing after close()")
        segments, _ = self._model.transcribe(
            samples,
            language="en",
            beam_size=self._beam_size,
            without_timestamps=True,
            condition_on_previous_text=False,
            vad_filter=skip_silence,
        )
        return " ".join(segment.text.strip() for segment in segments).strip()
