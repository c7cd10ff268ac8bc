"""Conversation to tokens and back, for any checkpoint folder with a tokenizer.

From the files alone: `tokenizer.json` (the `tokenizers` library) and the chat template (Jinja). A role's process
imports neither PyTorch nor transformers for it.

Marks, such as the begin of a turn, are read in what the template writes and never in what somebody said: `<|im_end|>`
in a message is text, and ends nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypedDict

import msgspec

from omni_flow.compute.engine import Tokens
from omni_flow.compute.errors import BadCheckpoint, BadRequest
from omni_flow.models.template import ChatTemplate, template_of

_ANSWER: Final = "\x00answer\x00"
"""Stands for an answer where only what follows it is wanted."""

_BREAK: Final = "\ufdd0"
"""Put into a mark in somebody's text, so that it isn't read as one; its own token is taken out again. Unicode has it
for such use alone, so in a text it means nothing."""


class ChatMessage(TypedDict):
    """One turn: role is `system`, `user`, `assistant` or what else the template knows, a word."""

    role: Annotated[str, msgspec.Meta(pattern=r"^\w+\Z")]
    content: str


_Messages = Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]


def checked(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """A conversation as a caller sent it, without what `ChatMessage` does not have. Raises BadRequest naming the place
    that is not as it says."""
    try:
        return msgspec.convert(messages, _Messages)
    except msgspec.ValidationError as wrong:
        why = str(wrong).replace("`$", "`messages")
        raise BadRequest(f"messages: {why}", "see ChatMessage") from wrong


class Processor:
    """The tokenizer of a checkpoint folder.

    Args:
        folder: with tokenizer.json, and mostly tokenizer_config.json.
        template: chat template (Jinja) where the folder has none.

    Raises:
        BadCheckpoint: the folder has no tokenizer, or there is no template.
    """

    def __init__(self, folder: str | Path, template: str | None = None) -> None:
        from tokenizers import AddedToken, Tokenizer

        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise BadCheckpoint(f"{folder} has no tokenizer.json", "fetch it with the weights")
        config = _config(path)
        source = template_of(path, config) or template
        if source is None:
            raise BadCheckpoint(f"the tokenizer in {folder} has no chat template", "give one")
        self._tokenizer: Any = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._names = {name: text for name in ("bos_token", "eos_token") if (text := _text(config.get(name)))}
        self._template = ChatTemplate(source)
        added = self._tokenizer.get_added_tokens_decoder()
        read = {one.content for one in added.values() if not one.special}
        self._longest = max(map(len, {*self._tokenizer.get_vocab(with_added_tokens=False), *read}))
        self._special = {token for token, one in added.items() if one.special}
        self.end_id: int | None = self._id("eos_token")
        marks = {one.content for one in added.values() if one.special}
        marks |= self._template.own(one.content for one in added.values() if one.content.strip())
        longest = sorted((re.escape(mark) for mark in marks if len(mark) > 1), key=len, reverse=True)
        self._marks = re.compile("|".join(longest) or r"(?!)")
        self._tokenizer.add_special_tokens([AddedToken(_BREAK, normalized=False)])
        self._break: int = self._tokenizer.token_to_id(_BREAK)

    def _id(self, name: str) -> int | None:
        text = self._names.get(name)
        found: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return found

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError) as wrong:
            raise BadRequest(f"a text that has no tokens: {wrong}", "give valid Unicode") from wrong
        return [token for token in ids if token != self._break] if _BREAK in text else ids

    def _said(self, text: str) -> str:
        """A text in which no mark is read."""
        while self._marks.search(text):  # what is left of one may be the begin of another
            text = self._marks.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)
        return text

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        said = [{**message, "content": self._said(message["content"])} for message in messages]
        return self._template.render(said, self._names)

    def chat(self, messages: Sequence[ChatMessage]) -> Tokens:
        """The prompt for the next answer of the assistant. Raises BadRequest: the model's template refuses it."""
        return Tokens(self._encode(self._render(messages)))

    def least(self, text: str) -> int:
        """How many tokens a text has at least, told by its length alone: none covers more than the longest one."""
        return -(-len(text) // self._longest)

    def after_answer(self, message: ChatMessage) -> Tokens:
        """What stands between the last token of an answer and the answer to the next message.

        Put behind the tokens of a prompt and its answer it makes the next prompt of the conversation, of which those
        tokens are a prefix as they are: text made of them might be cut into other tokens.
        """
        before: list[ChatMessage] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        return Tokens(self._encode(self._render([*before, message]).partition(_ANSWER)[2]))

    def text(self, text: str) -> Tokens:
        """A plain text with the begin token, as a base model continues it."""
        begin = self._id("bos_token")
        return Tokens([*([] if begin is None else [begin]), *self._encode(self._said(text))])

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def is_special(self, token: int) -> bool:
        """Whether a token is no text but a mark, such as the end of a turn."""
        return token in self._special

    def stream(self) -> PieceStream:
        """Turns tokens into pieces of text one after the other."""
        return PieceStream(self._tokenizer)


class PieceStream:
    """The text of a growing sequence; a character made of several tokens comes in one piece."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """The text that this token completes, "" if none."""
        piece: str | None = self._stream.step(self._tokenizer, token)
        return piece or ""

    def add_all(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join(self.add(token) for token in tokens)


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as wrong:
        raise BadCheckpoint(f"{path} is no JSON: {wrong}", "fetch it again") from wrong
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{path} holds no object", "fetch it again")
    return found


def _text(token: Any) -> str | None:
    """The text of a special token, which a config gives as it is or with how it is stripped."""
    return token.get("content") if isinstance(token, dict) else token
