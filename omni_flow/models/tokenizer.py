"""Conversation to tokens and back, for any checkpoint folder with a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from omni_flow.compute.engine import Tokens
from omni_flow.compute.errors import BadCheckpoint


class ChatMessage(TypedDict):
    """One turn: role is `system`, `user` or `assistant`."""

    role: str
    content: str


class Processor:
    """The tokenizer of a checkpoint folder.

    Args:
        folder: with tokenizer.json.
        template: chat template (Jinja) where the tokenizer's own config has none.

    Raises:
        BadCheckpoint: the folder has no tokenizer, or there is no template.
    """

    def __init__(self, folder: str | Path, template: str | None = None) -> None:
        from transformers import AutoTokenizer

        if not (Path(folder) / "tokenizer.json").is_file():
            raise BadCheckpoint(f"{folder} has no tokenizer.json", "fetch it with the weights")
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.chat_template is None:
            if template is None:
                raise BadCheckpoint(f"the tokenizer in {folder} has no chat template", "give one")
            tokenizer.chat_template = template
        self._tokenizer = tokenizer
        self.end_id: int = tokenizer.eos_token_id

    def chat(self, messages: Sequence[ChatMessage]) -> Tokens:
        """The prompt for the next answer of the assistant."""
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return Tokens(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, text: str) -> Tokens:
        """A plain text with the begin token, as a base model continues it."""
        return Tokens([self._tokenizer.bos_token_id, *self._tokenizer.encode(text, add_special_tokens=False)])

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def stream(self) -> PieceStream:
        """Turns tokens into pieces of text one after the other."""
        return PieceStream(self._tokenizer.backend_tokenizer)


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
