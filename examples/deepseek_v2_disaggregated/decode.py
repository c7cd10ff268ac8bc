"""The decode role: goes on from a prompt whose KV another replica left in the pool."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from omni_flow.compute.engine import EndEvent, Tokens
from omni_flow.control.runtime.methods import Emit, emit
from omni_flow.models.deepseek_v2.template import TEMPLATE
from omni_flow.models.engine_role import EngineRole, Turn

from .prefill import Begun


class Decode(EngineRole):
    """Makes the tokens after the first. Penalties and stop texts count from the second. Args: see `EngineRole`."""

    def __init__(self, model: str, **more: Any) -> None:
        super().__init__(model, **{"template": TEMPLATE, **more})

    async def go_on(self, ctx: Turn, begun: Begun) -> AsyncGenerator[Emit, None]:
        """Give `token`, pieces of text, the first at once; at the end `reused`, tokens of the prompt that were found in
        the pool, `usage` and `finish` as OpenAI's API has them."""
        sampling = self.sampling(ctx)
        pieces = self.processor.stream()
        if piece := pieces.add(begun.first):
            yield emit(token=piece)
        over = begun.first == self.processor.end_id and not sampling.ignore_eos
        over = over or begun.first in sampling.stop_token_ids
        if over or sampling.max_tokens == 1:
            usage = {"prompt_tokens": len(begun.prompt), "completion_tokens": 1}
            yield emit(reused=0, usage=usage, finish="stop" if over else "length")
            return
        rest = msgspec.structs.replace(
            sampling,
            max_tokens=sampling.max_tokens - 1,
            min_tokens=max(0, sampling.min_tokens - 1),
            seed=begun.seed,
        )
        prompt = Tokens([*begun.prompt, begun.first])
        async with aclosing(self.tokens(ctx, prompt, rest)) as tokens:
            async for token in tokens:
                if isinstance(token, EndEvent):
                    usage = {"prompt_tokens": len(begun.prompt), "completion_tokens": 1 + token.tokens}
                    yield emit(reused=token.cached_tokens, usage=usage, finish=token.reason)
                elif piece := pieces.add(token):
                    yield emit(token=piece)
