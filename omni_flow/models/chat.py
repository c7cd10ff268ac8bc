"""A language model as a role: a conversation in, pieces of text out, over an engine of its own.

A session's turns are kept here as text; what a turn repeats of the turns before is found in the KV cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from omni_flow.compute.engine import EndEvent
from omni_flow.models.engine_role import EngineRole, Turn
from omni_flow.models.tokenizer import ChatMessage


class ChatTurn(Turn, Protocol):
    """What a chat role reads of an activation's context."""

    def progress(self, fraction: float, note: str = "") -> None: ...


class ChatModel(EngineRole):
    """One engine with one model, and the conversations of its sessions.

    Args:
        model: folder of the checkpoint in its official layout.
        sessions: conversations kept; the least recently used is forgotten first.
        system: the system message of every conversation, if any.
        more: see `EngineRole`.
    """

    def __init__(self, model: str, *, sessions: int = 1000, system: str | None = None, **more: Any) -> None:
        super().__init__(model, **more)
        self._most = sessions
        self._system: list[ChatMessage] = [] if system is None else [{"role": "system", "content": system}]
        self._turns: OrderedDict[str, list[ChatMessage]] = OrderedDict()

    def history(self, session: str | None) -> list[ChatMessage]:
        """The turns of a session so far, the system message first."""
        turns = [] if session is None else self._turns.get(session, [])
        return [*self._system, *turns]

    async def answer(self, turn: ChatTurn, messages: Sequence[ChatMessage]) -> AsyncGenerator[str, None]:
        """Pieces of text that join to the answer to a whole conversation. Closing ends the computation.

        Says by `turn.progress` at the end how many tokens of the prompt were found in the cache.

        Raises:
            PromptTooLong: it does not fit model or pool.
        """
        prompt = self.processor.chat(messages)
        pieces = self.processor.stream()
        async with aclosing(self.tokens(turn, prompt, self.sampling(turn))) as tokens:
            async for token in tokens:
                if isinstance(token, EndEvent):
                    note = f"{token.cached_tokens} of {token.prompt_tokens} prompt tokens cached, {token.tokens} made"
                    turn.progress(1.0, note)
                elif token != self.processor.end_id and (piece := pieces.add(token)):
                    yield piece

    async def chat(self, ctx: ChatTurn, question: str) -> AsyncGenerator[str, None]:
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
