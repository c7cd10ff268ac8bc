"""A language model as a role: a question or a conversation in, pieces of text out, over an engine of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from omni_flow.compute.engine import EndEvent, Tokens
from omni_flow.control.runtime.methods import Emit, emit
from omni_flow.models.conversation import Conversation, Conversations, Prompt
from omni_flow.models.engine_role import EngineRole, Turn
from omni_flow.models.spoken import logprobs_of, usage_of
from omni_flow.models.tokenizer import ChatMessage, checked


class ChatTurn(Turn, Protocol):
    """What a chat role reads of an activation's context, and says there."""

    @property
    def lineage(self) -> int: ...
    def advance(self, lineage: int) -> None: ...
    def progress(self, fraction: float, note: str = "") -> None: ...


class ChatModel(EngineRole):
    """One engine with one model, and the conversations of its sessions.

    A session's next turn extends the tokens of its last one, so that all of them are found in the KV cache. Sessions
    are kept by tenant and id, until they are over.

    Args:
        model: folder of the checkpoint in its official layout.
        sessions: conversations kept; the least recently used is forgotten first.
        system: the system message of every conversation, if any.
        more: see `EngineRole`.
    """

    def __init__(self, model: str, *, sessions: int = 1000, system: str | None = None, **more: Any) -> None:
        super().__init__(model, **more)
        self._conversations = Conversations(sessions)
        self._system: list[ChatMessage] = [] if system is None else [{"role": "system", "content": system}]

    async def end_session(self, session: str, tenant: str) -> None:
        """Forget what was said in a session that is over, and its KV."""
        self._conversations.forget(tenant, session)
        await super().end_session(session, tenant)

    async def reply(
        self, ctx: ChatTurn, question: str | None = None, messages: Sequence[ChatMessage] | None = None
    ) -> AsyncGenerator[Emit, None]:
        """The answer to the next question of a session, or to a whole conversation (which is no part of the session).

        Gives `token`, pieces of text, and `logprobs`, an entry for each token if the params ask for them; at the end
        `usage` and `finish`. In the form of OpenAI's API, see `spoken.py`. Says by `ctx.progress` how many tokens of
        the prompt were found in the cache. A turn that fails or is cancelled is no part of its session.

        Raises:
            BadRequest, PromptTooLong: the params are wrong; it does not fit model or pool.
            ConversationLost: this replica does not have what the session has said before.
        """
        sampling = self.sampling(ctx)
        talk, prompt = self._next(ctx, question, messages, sampling.max_tokens)
        pieces, said = self.processor.stream(), list[int]()
        async with aclosing(self.events(ctx, Tokens(prompt.ids), sampling)) as events:
            async for event in events:
                if isinstance(event, EndEvent):
                    talk.answered(prompt, said, self.processor)
                    if messages is None:
                        ctx.advance(talk.answers)
                    ctx.progress(1.0, _note(event))
                    yield emit(usage=usage_of(event), finish=event.reason)
                    continue
                said.append(event.token)
                if sampling.logprobs is not None and not self.processor.is_special(event.token):
                    yield emit(logprobs=logprobs_of(self.processor, event))
                if piece := pieces.add(event.token):
                    yield emit(token=piece)

    def _next(
        self, ctx: ChatTurn, question: str | None, messages: Sequence[ChatMessage] | None, answer: int
    ) -> tuple[Conversation, Prompt]:
        """The conversation that an answer of at most `answer` tokens goes into, and its prompt."""
        if messages is not None:
            whole = [*self._system, *checked(messages)]
            self.check_length(message["content"] for message in whole)
            return Conversation(), Prompt(list(self.processor.chat(whole).ids), whole)
        self.check_length([question or ""])
        talk = Conversation() if ctx.session is None else self._conversations.of(ctx.tenant, ctx.session, ctx.lineage)
        asked: ChatMessage = {"role": "user", "content": question or ""}
        processor = self.processor
        most = max(self.engine.ready.max_prompt - answer, 1)
        return talk, talk.prompt(asked, processor, most, self._system)


def _note(end: EndEvent) -> str:
    return f"{end.prompt_tokens} prompt tokens, {end.cached_tokens} cached; {end.tokens} made"
