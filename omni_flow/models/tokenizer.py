"""Conversation to tokens and back, for any checkpoint folder with a tokenizer.

From the files alone: `tokenizer.json` (the `tokenizers` library) and the chat template (Jinja). A role's process
imports neither PyTorch nor transformers for it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypedDict

import msgspec

from omni_flow.compute.engine import Tokens
from omni_flow.compute.errors import BadCheckpoint, BadRequest

_ANSWER: Final = "\x00answer\x00"
"""Stands for an answer where only what follows it is wanted."""


class ChatMessage(TypedDict):
    """One turn: role is `system`, `user` or `assistant`."""

    role: str
    content: str


_Messages = Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]


def checked(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """A conversation as a caller sent it. Raises BadRequest naming the place that is not as `ChatMessage` says."""
    try:
        msgspec.convert(messages, _Messages)
    except msgspec.ValidationError as wrong:
        why = str(wrong).replace("`$", "`messages")
        raise BadRequest(f"messages: {why}", "see ChatMessage") from wrong
    return messages


class Processor:
    """The tokenizer of a checkpoint folder.

    Args:
        folder: with tokenizer.json, and mostly tokenizer_config.json.
        template: chat template (Jinja) where the folder has none.

    Raises:
        BadCheckpoint: the folder has no tokenizer, or there is no template.
    """

    def __init__(self, folder: str | Path, template: str | None = None) -> None:
        from tokenizers import Tokenizer

        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise BadCheckpoint(f"{folder} has no tokenizer.json", "fetch it with the weights")
        config = _config(path)
        source = _template(path, config) or template
        if source is None:
            raise BadCheckpoint(f"the tokenizer in {folder} has no chat template", "give one")
        self._tokenizer: Any = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._names = {name: text for name in ("bos_token", "eos_token") if (text := _text(config.get(name)))}
        self._template = _compiled(source)
        self._special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        self.end_id: int | None = self._id("eos_token")

    def _id(self, name: str) -> int | None:
        text = self._names.get(name)
        found: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._template.render(messages=list(messages), add_generation_prompt=True, **self._names)
        except TemplateError as wrong:
            raise BadRequest(f"the chat template refuses the conversation: {wrong}", "see its roles") from wrong
        return text

    def chat(self, messages: Sequence[ChatMessage]) -> Tokens:
        """The prompt for the next answer of the assistant. Raises BadRequest: the model's template refuses it."""
        return Tokens(self._encode(self._render(messages)))

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
        return Tokens([*([] if begin is None else [begin]), *self._encode(text)])

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


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template of a folder: a file of its own, or in the config, alone or as `default` among several."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((one["template"] for one in found if one["name"] == "default"), None)
    return found


def _compiled(source: str) -> Any:
    """A template with what the templates of checkpoints rely on; it can reach nothing else."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(why: str) -> NoReturn:
        raise TemplateError(why)

    # Checkpoints' templates are written for these switches.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        return environment.from_string(source)
    except TemplateError as wrong:
        raise BadCheckpoint(f"the chat template is broken: {wrong}", "fetch it again") from wrong
