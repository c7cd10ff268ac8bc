"""What a session's next prompt is: the tokens of the last one and its answer, and what follows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from omni_flow.compute.errors import ConversationLost
from omni_flow.models.conversation import Conversation, Conversations
from omni_flow.models.tokenizer import ChatMessage, Processor
from omni_flow.testing import tiny_checkpoint

SYSTEM: list[ChatMessage] = [{"role": "system", "content": "Be brief."}]


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return Processor(tiny_checkpoint("deepseek_v2", tmp_path_factory.mktemp("model")))


def asks(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def test_a_prompt_extends_the_last_one_and_its_answer_token_by_token(processor: Processor) -> None:
    talk = Conversation()
    first = talk.prompt(asks("one?"), processor, 1000, SYSTEM)
    assert first.ids == list(processor.chat([*SYSTEM, asks("one?")]).ids)
    # the last is a part of a character: of its text other tokens would be made
    answer = list(processor.text("a🙂").ids[1:-1])
    talk.answered(first, answer, processor)
    second = talk.prompt(asks("two?"), processor, 1000, SYSTEM)
    assert second.ids[: len(first.ids) + len(answer)] == [*first.ids, *answer]
    assert second.ids[len(first.ids) + len(answer) :] == list(processor.after_answer(asks("two?")).ids)


def test_the_mark_at_the_end_of_an_answer_stands_once_in_the_next_prompt(processor: Processor) -> None:
    assert processor.end_id is not None
    talk = Conversation()
    answer = [*processor.text(" a").ids[1:], processor.end_id]
    talk.answered(talk.prompt(asks("one?"), processor, 1000), answer, processor)
    whole = processor.chat([asks("one?"), {"role": "assistant", "content": "a"}, asks("two?")])
    assert talk.prompt(asks("two?"), processor, 1000).ids == list(whole.ids)


def test_the_oldest_turns_are_forgotten_until_half_of_the_room_is_free(processor: Processor) -> None:
    talk = Conversation()
    most, lengths = 200, []
    for k in range(40):
        prompt = talk.prompt(asks(f"question {k}?"), processor, most, SYSTEM)
        lengths.append(len(prompt.ids))
        assert processor.decode(prompt.ids).endswith(f"User: question {k}?\n\nAssistant:")
        assert processor.decode(prompt.ids).startswith("Be brief.")
        talk.answered(prompt, [97 + k % 20] * 5, processor)
    assert max(lengths) <= most
    assert sum(b < a for a, b in pairwise(lengths)) > 2
    assert all(b <= most // 2 for a, b in pairwise(lengths) if b < a)


def test_a_question_that_is_too_long_alone_is_left_whole_for_the_engine_to_refuse(processor: Processor) -> None:
    talk = Conversation()
    talk.answered(talk.prompt(asks("one?"), processor, 100), [97], processor)
    prompt = talk.prompt(asks("x" * 500), processor, 100)
    assert len(prompt.ids) > 500
    assert prompt.turns == [asks("x" * 500)]


def test_of_two_turns_at_once_the_next_goes_on_from_the_one_that_ended_last(processor: Processor) -> None:
    talk = Conversation()
    one, two = (talk.prompt(asks(text), processor, 1000) for text in ("one?", "two?"))
    talk.answered(two, [98], processor)
    talk.answered(one, [97], processor)
    assert talk.prompt(asks("three?"), processor, 1000).ids[: len(one.ids) + 1] == [*one.ids, 97]
    assert [turn["content"] for turn in talk.turns] == ["one?", processor.decode([97])]


def test_conversations_are_kept_by_tenant_and_session_the_last_used_longest() -> None:
    talks = Conversations(2)
    a = talks.of("ada", "s")
    assert talks.of("bob", "s") is not a
    assert talks.of("ada", "s") is a
    talks.of("ada", "t")
    assert len(talks) == 2
    assert talks.of("ada", "s") is a
    talks.forget("ada", "s")
    talks.forget("ada", "s")
    assert talks.of("ada", "s") is not a


def test_a_conversation_with_fewer_answers_than_there_have_been_is_refused_as_lost(processor: Processor) -> None:
    talks = Conversations(2)
    talk = talks.of("ada", "s")
    for answers in range(3):
        assert talks.of("ada", "s", answers) is talk
        talk.answered(talk.prompt(asks("x" * 60), processor, 100), [97], processor)
    assert talk.answers == 3
    with pytest.raises(ConversationLost, match="has had 4 answers, this replica knows of 3"):
        talks.of("ada", "s", 4)
    with pytest.raises(ConversationLost, match="has had 1 answers, this replica knows of 0"):
        talks.of("bob", "s", 1)
    assert len(talks) == 1  # what is refused takes no room
    talks.of("ada", "t")
    talks.of("ada", "u")
    with pytest.raises(ConversationLost, match="others took the room"):
        talks.of("ada", "s", 3)
