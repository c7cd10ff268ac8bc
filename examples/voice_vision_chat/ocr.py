"""Reading text in pictures: PP-OCRv4 detection and recognition through ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from omni_flow.control.types import Image
from omni_flow.refs import ABSENT, Absent

if TYPE_CHECKING:
    from rapidocr_onnxruntime import RapidOCR

_MAX_ASPECT = 6


class RapidOcr:
    """Turns a picture into the lines of text seen in it. `threads` CPU threads work on a call."""

    def __init__(self, threads: int = 1, min_score: float = 0.5) -> None:
        """Lines recognised with a score below `min_score` (0 to 1) are dropped."""
        self._threads = threads
        self._min_score = min_score
        self._engine: RapidOCR | None = None

    def setup(self) -> None:
        """Loads the three models. Sets the number of OpenCV threads of the whole process."""
        import cv2
        from rapidocr_onnxruntime import RapidOCR

        cv2.setNumThreads(self._threads)
        self._engine = RapidOCR(intra_op_num_threads=self._threads, inter_op_num_threads=1, text_score=self._min_score)

    def warm_up(self) -> None:
        """Runs every model once, on drawn text."""
        import cv2

        board = np.full((64, 256, 3), 255, np.uint8)
        cv2.putText(board, "Warm up", (16, 44), cv2.FONT_HERSHEY_SIMPLEX, 1.2, (0, 0, 0), 2)
        self.read(board)

    def close(self) -> None:
        """Frees the models."""
        self._engine = None

    def read(self, picture: Annotated[NDArray[np.uint8], Image]) -> str | Absent:
        """The lines in `picture` (height × width × RGB, uint8) from top to bottom, or ABSENT when there is no text.

        Raises ValueError for another shape or dtype.
        """
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise ValueError(
                f"picture is {picture.dtype} of shape {picture.shape}: expected uint8 of shape (height, width, 3)"
            )
        if self._engine is None:
            raise RuntimeError("RapidOcr has no models: call setup() first, and nothing after close()")
        lines, _ = self._engine(np.ascontiguousarray(_widened(picture)[:, :, ::-1]))
        return "\n".join(text for _, text, _ in lines or []) or ABSENT


def _widened(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`picture` with its last rows or columns repeated until no side is over `_MAX_ASPECT` times the other.

    The detector scales the short side up to 736 pixels, so a thin strip would become a picture of enormous width.
    """
    height, width = picture.shape[:2]
    missing = (max(0, -(-width // _MAX_ASPECT) - height), max(0, -(-height // _MAX_ASPECT) - width))
    return np.pad(picture, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="edge")
