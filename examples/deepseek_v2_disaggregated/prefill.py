"""The prefill role: a question in, its token ids and the first token of the answer out; its KV stays in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from omni_flow.compute.engine import EndEvent
from omni_flow.models.deepseek_v2.template import TEMPLATE
from omni_flow.models.engine_role import EngineRole, Turn
from omni_flow.models.tokenizer import ChatMessage, checked


class Begun(msgspec.Struct, frozen=True):
    """An answer that has begun.

    `prompt`: its token ids; with them anybody finds the KV. `first`: the first token of the answer. `seed`: of the
    draw, so that it goes on as if one role had made it all.
    """

    prompt: list[int]
    first: int
    seed: int


class Prefill(EngineRole):
    """Computes prompts. Args: see `EngineRole`."""

    def __init__(self, model: str, **more: Any) -> None:
        super().__init__(model, **{"template": TEMPLATE, **more})

    async def begin(
        self, ctx: Turn, question: str | None = None, messages: Sequence[ChatMessage] | None = None
    ) -> Begun:
        """Compute the prompt of a question or a conversation, and the first token.

        Raises:
            BadRequest, PromptTooLong: a message is malformed; it does not fit model or pool.
        """
        if messages is None:
            prompt = self.prompt(question or "")
        else:
            whole = checked(messages)
            self.check_length(message["content"] for message in whole)
            prompt = self.processor.chat(whole)
        sampling = self.sampling(ctx)
        first = self.processor.end_id
        async with aclosing(self.tokens(ctx, prompt, msgspec.structs.replace(sampling, max_tokens=1))) as tokens:
            async for token in tokens:
                if not isinstance(token, EndEvent):
                    first = token
        return Begun(list(prompt.ids), first, sampling.seed)
