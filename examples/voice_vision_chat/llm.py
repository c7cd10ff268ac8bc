"""The language model: SmolLM2-135M-Instruct through transformers, one token at a time."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from . import weights

if TYPE_CHECKING:
    from torch import Tensor


class Context(Protocol):
    """What `SmolLM2.chat` reads of the activation's context."""

    @property
    def seed(self) -> int: ...


class PromptTooLong(ValueError):
    """The question and the text of the picture take more tokens than the role accepts."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, at most {most} are accepted: ask a shorter question or show a picture "
            "with less text, or raise max_prompt in the role's init"
        )


class SmolLM2:
    """Answers a question, with the text of a picture if there is one. `threads` CPU threads work on a token.

    Greedy at `temperature` 0, which gives the same answer each time; else top-p sampling from the context's seed.
    """

    def __init__(
        self,
        threads: int = 1,
        max_tokens: int = 96,
        temperature: float = 0.0,
        top_p: float = 0.9,
        max_prompt: int = 4096,
        cache: str | None = None,
    ) -> None:
        """`cache`: the folder for the converted weights, by default the user's cache (see `weights.cache_dir`)."""
        self._threads = threads
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._top_p = top_p
        self._max_prompt = max_prompt
        self._cache = Path(cache) if cache is not None else None
        self._model: Any = None
        self._tokenizer: Any = None

    def setup(self) -> None:
        """Loads the model; converts it first if that was never done. Sets PyTorch's threads and silences
        progress bars, both for the whole process.

        Raises WeightsMissing.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        torch.set_num_threads(self._threads)
        quiet: Any = logging.disable_progress_bar
        quiet()
        folder = weights.smollm2(self._cache)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model = model.eval()

    def warm_up(self) -> None:
        """Computes a prompt and two tokens."""
        tokens = self._tokens(self._prompt("Hello!", None), seed=0)
        next(tokens)
        next(tokens)
        tokens.close()

    def close(self) -> None:
        """Frees the model."""
        self._model = self._tokenizer = None

    def chat(self, ctx: Context, question: str, seen: str | None = None) -> Generator[str, None, None]:
        """The answer to `question` in pieces of text as they are made; `seen` is text that a picture shows.

        The pieces join to the whole answer; a character made of several tokens comes in one piece. Closing the
        generator ends the computation. Raises PromptTooLong.
        """
        from tokenizers.decoders import DecodeStream

        text = DecodeStream(skip_special_tokens=True)
        for token in self._tokens(self._prompt(question, seen), ctx.seed):
            piece = text.step(self._tokenizer.backend_tokenizer, token)
            if piece:
                yield piece

    def _prompt(self, question: str, seen: str | None) -> Tensor:
        if self._model is None:
            raise RuntimeError("SmolLM2 has no model: call setup() first, and nothing after close()")
        content = question if seen is None else f"A picture shows this text:\n{seen}\n\n{question}"
        encoded = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids: Tensor = encoded["input_ids"]
        if ids.shape[1] > self._max_prompt:
            raise PromptTooLong(ids.shape[1], self._max_prompt)
        return ids

    def _tokens(self, prompt: Tensor, seed: int) -> Generator[int, None, None]:
        import torch
        from transformers import DynamicCache

        model, choose = self._model, self._sampler(seed)
        cache, ids = DynamicCache(), prompt
        for _ in range(self._max_tokens):
            # Not around the yield: the mode belongs to the thread, and a generator may be resumed by another.
            with torch.inference_mode():
                logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
                token = int(choose(logits.float()))
            if token == model.config.eos_token_id:
                return
            yield token
            ids = torch.tensor([[token]])

    def _sampler(self, seed: int) -> Any:
        import torch
        from transformers import TemperatureLogitsWarper, TopPLogitsWarper

        if self._temperature <= 0:
            return torch.argmax
        heat, nucleus = TemperatureLogitsWarper(self._temperature), TopPLogitsWarper(self._top_p)
        random = torch.Generator().manual_seed(seed)

        def sample(logits: Tensor) -> Tensor:
            no_ids = torch.empty(0, dtype=torch.long)
            chances = nucleus(no_ids, heat(no_ids, logits)).softmax(-1)
            return torch.multinomial(chances, 1, generator=random)

        return sample
