"""A language model as a role: a conversation in, pieces of text out, over an engine of its own.

A session's turns are kept here as text; what a turn repeats of the turns before is found in the KV cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from omni_flow.compute.engine import EndEvent, Request, TokenEvent
from omni_flow.compute.sampling import Sampling
from omni_flow.compute.sglang.config import EngineConfig
from omni_flow.compute.sglang.kernel import SGLangEngine
from omni_flow.models.tokenizer import ChatMessage, Processor


class Turn(Protocol):
    """What a chat role reads of an activation's context."""

    @property
    def session(self) -> str | None: ...
    @property
    def seed(self) -> int: ...
    def progress(self, fraction: float, note: str = "") -> None: ...


class ChatModel:
    """One engine with one model, and the conversations of its sessions.

    Args:
        model: folder of the checkpoint in its official layout.
        engine: further fields of `EngineConfig`.
        sampling: fields of `Sampling`; the seed comes from the activation.
        sessions: conversations kept; the least recently used is forgotten first.
        system: the system message of every conversation, if any.
        template: chat template where the tokenizer has none.
    """

    def __init__(
        self,
        model: str,
        *,
        engine: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        sessions: int = 1000,
        system: str | None = None,
        template: str | None = None,
    ) -> None:
        self._config = EngineConfig(model=model, **(engine or {}))
        self._sampling = sampling or {}
        Sampling(**self._sampling)
        self._most = sessions
        self._system: list[ChatMessage] = [] if system is None else [{"role": "system", "content": system}]
        self._template = template
        self._turns: OrderedDict[str, list[ChatMessage]] = OrderedDict()
        self.engine = SGLangEngine(self._config)
        self.processor: Processor

    async def setup(self) -> None:
        """Start the engine and read the tokenizer.

        Raises:
            ComputeError: what is missing or wrong.
        """
        self.processor = Processor(self._config.model, self._template)
        await self.engine.start()

    async def warm_up(self) -> None:
        """Compute a prompt and two tokens."""
        request = Request(
            spans=[self.processor.chat([{"role": "user", "content": "Hello!"}])], sampling=Sampling(max_tokens=2)
        )
        async for _ in self.engine.generate(request):
            pass

    async def close(self) -> None:
        """End the engine."""
        await self.engine.close()

    def history(self, session: str | None) -> list[ChatMessage]:
        """The turns of a session so far, the system message first."""
        turns = [] if session is None else self._turns.get(session, [])
        return [*self._system, *turns]

    async def answer(self, turn: Turn, messages: Sequence[ChatMessage]) -> AsyncGenerator[str, None]:
        """Pieces of text that join to the answer to a whole conversation. Closing ends the computation.

        Says by `turn.progress` at the end how many tokens of the prompt were found in the cache.

        Raises:
            PromptTooLong: it does not fit model or pool.
        """
        prompt = self.processor.chat(messages)
        sampling = Sampling(**self._sampling, seed=turn.seed)
        pieces = self.processor.stream()
        async with aclosing(self.engine.generate(Request(spans=[prompt], sampling=sampling))) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    if event.token != self.processor.end_id and (piece := pieces.add(event.token)):
                        yield piece
                elif isinstance(event, EndEvent):
                    note = f"{event.cached_tokens} of {event.prompt_tokens} prompt tokens cached, {event.tokens} made"
                    turn.progress(1.0, note)

    async def chat(self, ctx: Turn, question: str) -> AsyncGenerator[str, None]:
        """The answer to a question as the next turn of the session."""
        asked: ChatMessage = {"role": "user", "content": question}
        said: list[str] = []
        async with aclosing(self.answer(ctx, [*self.history(ctx.session), asked])) as pieces:
            async for piece in pieces:
                said.append(piece)
                yield piece
        if ctx.session is not None:
            self.remember(ctx.session, asked, {"role": "assistant", "content": "".join(said)})

    def remember(self, session: str, *turns: ChatMessage) -> None:
        """Add turns to a session."""
        self._turns.setdefault(session, []).extend(turns)
        self._turns.move_to_end(session)
        while len(self._turns) > self._most:
            self._turns.popitem(last=False)
