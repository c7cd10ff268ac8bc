"""What the sessions of a chat role have said so far, as the tokens that the model saw."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from omni_flow.compute.errors import ConversationLost
from omni_flow.models.tokenizer import ChatMessage, Processor


@dataclass(slots=True, eq=False)
class Conversation:
    """The turns of one session.

    `ids` is the last prompt with its answer, so the next prompt extends it token by token and finds its KV. `turns` is
    the same as text, for when the beginning has to be forgotten. `answers` counts all there have been. Turns under way
    at the same time all go on from what was there when they began; the next one goes on from the one that ended last.
    """

    ids: list[int] = field(default_factory=list)
    turns: list[ChatMessage] = field(default_factory=list)
    answers: int = 0

    def prompt(self, asked: ChatMessage, processor: Processor, most: int, system: Sequence[ChatMessage] = ()) -> Prompt:
        """The prompt for the next answer. If it has more than `most` tokens the oldest turns are forgotten, until half
        of that is free again; the last message is never cut."""
        if self.ids:
            ids = [*self.ids, *processor.after_answer(asked).ids]
        else:
            ids = list(processor.chat([*system, asked]).ids)
        if len(ids) <= most:
            return Prompt(ids, [*self.turns, asked])
        turns = list(self.turns)
        while turns and len(ids) > most // 2:
            del turns[:2]
            ids = list(processor.chat([*system, *turns, asked]).ids)
        return Prompt(ids, [*turns, asked])

    def answered(self, prompt: Prompt, answer: Sequence[int], processor: Processor) -> None:
        """A turn ended with these tokens; a mark at their end is not part of the text."""
        said = list(answer)
        while said and processor.is_special(said[-1]):
            said.pop()
        self.ids = [*prompt.ids, *said]
        self.turns = [*prompt.turns, {"role": "assistant", "content": processor.decode(said)}]
        self.answers += 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and the turns that it is made of."""

    ids: list[int]
    turns: list[ChatMessage]


class Conversations:
    """At most `most` conversations; the least recently used is forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: OrderedDict[tuple[str, str], Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def of(self, tenant: str, session: str, answers: int = 0) -> Conversation:
        """That of a tenant's session, made at need.

        Args:
            answers: as many as there have been, as far as is known.

        Raises:
            ConversationLost: it is not here with as many.
        """
        known = self._all.get((tenant, session))
        kept = 0 if known is None else known.answers
        if kept < answers:
            raise ConversationLost(
                f"session {session!r} has had {answers} answers, this replica knows of {kept}: its process was "
                "restarted, or others took the room",
                "close the session or begin another one, or send the whole conversation",
            )
        found = self._all.setdefault((tenant, session), Conversation())
        self._all.move_to_end((tenant, session))
        while len(self._all) > self._most:
            self._all.popitem(last=False)
        return found

    def forget(self, tenant: str, session: str) -> None:
        """The session is over."""
        self._all.pop((tenant, session), None)
