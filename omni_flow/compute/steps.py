"""Step hooks: a model's own object between one decode step and the next.

It gets the hidden states of a step and returns what is emitted and what goes in next, which may be an embedding instead
of a token: several heads, several codebooks, a state machine. It runs in the engine process, batched over the requests
that asked for it, next to ordinary requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class StepRow(NamedTuple):
    """One request of a step.

    Args:
        state: what `StepHook.begin` made for it.
        step: tokens generated before this one.
        seed: of the request, for draws of the hook's own heads (`omni_flow.compute.sampler.sample`).
    """

    state: Any
    step: int
    seed: int


class StepResult(NamedTuple):
    """What a hook makes of a step, for its rows in their order.

    Args:
        tokens: (rows,) int64, the tokens that the scheduler records; a stop token of the request ends it.
        feeds: (rows,) bool, which rows continue from an embedding; None: no row.
        embeddings: (rows, hidden size), read where `feeds` is true.
        emitted: per row bytes that go out with the token's event, or None.
    """

    tokens: Tensor
    feeds: Tensor | None
    embeddings: Tensor | None
    emitted: Sequence[bytes | None]


class StepHook(Protocol):
    """See the module."""

    def begin(self, asked: Mapping[str, Any]) -> Any:
        """The state of a new request, from what its `Request.steps` says."""

    def step(self, rows: Sequence[StepRow], hidden: Tensor, tokens: Tensor, logits: Tensor) -> StepResult:
        """One step.

        Args:
            hidden: (rows, hidden size), what the language head reads.
            tokens: (rows,) what the language head chose.
            logits: (rows, vocabulary) of the language head.
        """


MakeStepHook = Callable[[Any], StepHook]
"""Called in the engine process with the loaded model; an importable function or class."""


def reference(function: Callable[..., Any]) -> str:
    """`module:name` of an importable function or class, by which another process finds it.

    Raises:
        ValueError: a lambda or an inner function, which no other process can find.
    """
    name = function.__qualname__
    if "<" in name or function.__module__ == "__main__":
        raise ValueError(f"{function.__module__}.{name} can't be imported by another process; define it in a module")
    return f"{function.__module__}:{name}"
