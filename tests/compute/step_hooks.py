"""A step hook for tests: two codebooks with heads of their own, and text again after a number of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_flow.compute.steps import StepResult, StepRow

BOOKS, SIZE, MARK = 2, 50, 7


def heads(hidden: int) -> tuple[Tensor, Tensor]:
    """Weights of the heads (books, size, hidden) and embeddings of the codes (books, size, hidden)."""
    random = torch.Generator().manual_seed(5)
    return (
        torch.randn(BOOKS, SIZE, hidden, generator=random),
        torch.randn(BOOKS, SIZE, hidden, generator=random) * 0.5,
    )


class Codes:
    """The first `codes` steps emit one code per book and continue from the sum of their embeddings; then text."""

    def __init__(self, model: Any) -> None:
        device = next(model.parameters()).device
        self.heads, self.embeddings = (table.to(device) for table in heads(model.config.hidden_size))

    def begin(self, asked: Mapping[str, Any]) -> int:
        codes: int = asked["codes"]
        return codes

    def step(self, rows: Sequence[StepRow], hidden: Tensor, tokens: Tensor, logits: Tensor) -> StepResult:
        codes = torch.einsum("bsh,rh->rbs", self.heads, hidden.float()).argmax(-1)
        embeddings = sum(self.embeddings[book][codes[:, book]] for book in range(BOOKS))
        feeds = torch.tensor([row.step < row.state for row in rows], device=hidden.device)
        return StepResult(
            torch.where(feeds, MARK, tokens),
            feeds,
            embeddings,
            [bytes(line) if fed else None for line, fed in zip(codes.tolist(), feeds.tolist(), strict=True)],
        )
