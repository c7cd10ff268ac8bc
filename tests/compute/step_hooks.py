"""Step hooks for tests: two codebooks with heads of their own, and text again after a number of steps; one that breaks;
and one by which a test stops the engine in the middle of a prefill."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
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


class Warns(Codes):
    """`Codes` that have something to say when they are made."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        logging.getLogger("omni_flow.tests").warning("made of %d %s", BOOKS, "codebooks")


ONCE, ALWAYS = 1e6, 1e7
"""Rows as large as this make the model of `Breaks` raise, the first time or each time."""


class Breaks(Codes):
    """`Codes` that do what a request asks, and a model that raises for some rows.

    A request says in `breaks` in which way, and in `after` in which step: `begin` or `step` raise, or what `step` gives
    has too few `tokens`, is `emitted` as text, or is `nothing`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.raised = False
        model.model.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, _module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        rows = [x for x in (*given, *named.values()) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
        largest = max((float(x.abs().max()) for x in rows), default=0.0)
        if largest >= ALWAYS or (largest >= ONCE and not self.raised):
            self.raised = True
            raise ArithmeticError(f"rows as large as {largest:g}")

    def begin(self, asked: Mapping[str, Any]) -> Any:
        if asked["breaks"] == "begin":
            raise LookupError("no such voice")
        return asked

    def step(self, rows: Sequence[StepRow], hidden: Tensor, tokens: Tensor, logits: Tensor) -> Any:
        wanted = {row.state["breaks"] for row in rows if row.step >= row.state["after"]}
        if "step" in wanted:
            raise LookupError("no such code")
        if "nothing" in wanted:
            return None
        emitted: list[Any] = [b"fine"] * len(rows)
        if "emitted" in wanted:
            emitted = ["text"] * len(rows)
        return StepResult(tokens[:-1] if "tokens" in wanted else tokens, None, None, emitted)


GATE = "OMNI_FLOW_TEST_GATE"
"""Environment variable with the path of a pipe."""
GATED = range(32, 64)
"""Positions of the forward that stops where the pipe is there, until it was opened for writing and closed."""


class Gate(Codes):
    """`Codes`, and a model that waits in one chunk of a prompt."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.pipe = Path(os.environ[GATE])
        model.model.register_forward_pre_hook(self.wait)

    def wait(self, _module: Any, given: tuple[Any, ...]) -> None:
        if given[1].tolist() == list(GATED) and self.pipe.is_fifo():
            self.pipe.read_bytes()
