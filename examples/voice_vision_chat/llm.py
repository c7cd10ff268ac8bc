"""The language model: SmolLM2-135M-Instruct in an SGLang engine, its KV in the node's memory manager."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from omni_flow.control.runtime.methods import Emit
from omni_flow.data.pool_spec import PoolSpec
from omni_flow.models.chat import ChatModel, ChatTurn

from . import weights

_ENGINE = {"device": "cpu", "max_tokens": 4096, "max_running": 8}
"""46 KB of KV a token."""


class SmolLM2(ChatModel):
    """Answers questions, with the text of a picture if there is one; the turns of a session are one conversation."""

    def __init__(self, model: str = "smollm2", *, engine: dict[str, Any] | None = None, **more: Any) -> None:
        """`model` is "smollm2" (the weights in the demo's packages) or a folder with a checkpoint; `engine` and `more`
        as in `ChatModel`. Raises WeightsMissing.
        """
        super().__init__(_folder(model), engine={**_ENGINE, **(engine or {})}, **more)

    @classmethod
    def kv_pools(
        cls, model: str = "smollm2", *, engine: dict[str, Any] | None = None, **more: Any
    ) -> tuple[PoolSpec, ...]:
        """The pool of one replica. Converts the weights first if that was never done. Raises WeightsMissing."""
        return super().kv_pools(_folder(model), engine={**_ENGINE, **(engine or {})}, **more)

    async def chat(self, ctx: ChatTurn, question: str, seen: str | None = None) -> AsyncGenerator[Emit, None]:
        """The answer to `question` as `reply` gives it; `seen` is text that a picture shows."""
        asked = question if seen is None else f"A picture shows this text:\n{seen}\n\n{question}"
        async with aclosing(self.reply(ctx, asked)) as said:
            async for one in said:
                yield one


def _folder(model: str) -> str:
    return str(weights.smollm2()) if model == "smollm2" else model
