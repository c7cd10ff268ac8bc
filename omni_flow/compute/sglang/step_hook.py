"""Where a step hook meets SGLang: behind the sampler, and before the model's next forward.

A row that continues from an embedding has it in a side table by the request's row in SGLang's tables; the model's
forward reads it from there, so a captured graph reads it as well.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from omni_flow.compute.errors import EngineFailed
from omni_flow.compute.sglang.failures import forward_failed
from omni_flow.compute.sglang.takeover import current
from omni_flow.compute.steps import StepHook, StepResult, StepRow


class Steps:
    """The step hook of an engine and its side table.

    Args:
        name: of the hook, for errors.
        hook: the model's object.
        rows: rows of SGLang's request table.
        hidden: width of an embedding.
    """

    def __init__(self, name: str, hook: StepHook, rows: int, hidden: int, dtype: Any, device: Any) -> None:
        import torch

        self.name = name
        self.hook = hook
        self.table = torch.zeros(rows, hidden, dtype=dtype, device=device)
        self.feeds = torch.zeros(rows, dtype=torch.bool, device=device)

    def inputs(self, embed: Any, ids: Any, rows: Any) -> Any:
        """Embeddings of a decode step: from the side table where a row feeds one, else of its token."""
        import torch

        return torch.where(self.feeds[rows][:, None], self.table[rows], embed(ids))

    def run(self, batch: Any, tokens: Any, hidden: Any, logits: Any) -> tuple[Any, list[bytes | None]]:
        """Let the hook work on its rows; returns the tokens of all rows, and what they emit. Where it raises, or gives
        what is no result for these rows, their requests end with this step and the others go on."""
        import torch

        emitted: list[bytes | None] = [None] * len(batch.rows)
        at = [number for number, row in enumerate(batch.rows) if row.request is not None and not row.partial]
        places = torch.tensor([row.place for row in batch.rows], device=tokens.device)
        feeds = torch.zeros(len(batch.rows), dtype=torch.bool, device=tokens.device)
        if at:
            requests = [batch.rows[number].request for number in at]
            rows = [StepRow(r.omni_state, len(r.omni_fed), r.omni_sampling.seed) for r in requests]
            index = torch.tensor(at, device=tokens.device)
            try:
                made = self.hook.step(rows, hidden[index], tokens[index], logits[index])
                self._check(made, len(rows))
            except Exception as error:
                self._end(requests, error)
            else:
                tokens = tokens.index_copy(0, index, made.tokens.to(tokens))
                for number, out in zip(at, made.emitted, strict=True):
                    emitted[number] = out
                if made.feeds is not None and made.embeddings is not None:
                    feeds[index] = made.feeds.to(feeds)
                    self.table[places[index]] = made.embeddings.to(self.table)
                for number, request in enumerate(requests):
                    fed = made.feeds is not None and bool(made.feeds[number])
                    request.omni_fed.append(
                        made.embeddings[number].clone() if fed and made.embeddings is not None else None
                    )
        self.feeds[places] = feeds
        return tokens, emitted

    def _check(self, made: StepResult, rows: int) -> None:
        """
        Raises:
            ValueError, TypeError: a result that is not one of so many rows.
        """
        import torch

        shapes = {"tokens": (rows,), "feeds": (rows,), "embeddings": (rows, self.table.shape[1])}
        for name, shape in shapes.items():
            given = getattr(made, name)
            if given is None and name != "tokens":
                continue
            if not isinstance(given, torch.Tensor):
                raise TypeError(f"{name} is {type(given).__name__}, not a tensor")
            if tuple(given.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(given.shape)}, not {shape}")
        if len(made.emitted) != rows or not all(out is None or isinstance(out, bytes) for out in made.emitted):
            raise ValueError(f"emitted is not bytes or None for each of {rows} rows")

    def _end(self, requests: Sequence[Any], error: Exception) -> None:
        """SGLang ends these requests when it looks at the tokens of this step."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        failed = forward_failed(f"the step hook {self.name}", error, self.table.device)
        for request in requests:
            request.to_finish = FINISH_ABORT(str(failed), err_type=type(failed).__name__)


def after_sampling(steps: Steps | None, output: Any, batch: Any, tokens: Any) -> Any:
    """Called by the sampler; returns the tokens that the scheduler goes on with."""
    emitted: list[bytes | None] = [None] * len(batch.rows)
    if steps is not None:
        tokens, emitted = steps.run(batch, tokens, output.hidden_states, output.next_token_logits)
    if batch.needs.report:
        logits, hidden = output.next_token_logits, output.hidden_states
        output.customized_info = {
            "logits": [logits[at].float().cpu() if row.logits else None for at, row in enumerate(batch.rows)],
            "hidden": [hidden[at].float().cpu() if row.hidden else None for at, row in enumerate(batch.rows)],
            "emitted": emitted,
        }
    return tokens


def token_embedding(model: Any) -> Any:
    """The module that makes rows of token ids. Not every model of SGLang has a method for it."""
    if hasattr(model, "get_input_embeddings"):
        return model.get_input_embeddings()
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    found = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
    if len(found) != 1:
        raise EngineFailed(f"{type(model).__name__} has {len(found)} token embeddings", "give it get_input_embeddings")
    return found[0]


def put_in(runner: Any, *_: Any, **__: Any) -> None:
    """Hook before `ModelRunner.init_cuda_graphs`: make the step hook for the loaded model, and let the model's decode
    steps, which are captured next, read its embeddings."""
    module, name = current().step_hook.split(":")
    make: Any = importlib.import_module(module)
    for part in name.split("."):
        make = getattr(make, part)
    model = runner.model
    rows = runner.req_to_token_pool.req_to_token.shape[0]
    hook = current().step_hook
    current().steps = steps = Steps(
        hook, make(model), rows, runner.model_config.hidden_size, runner.dtype, runner.device
    )
    original, embed = model.forward, token_embedding(model)

    @functools.wraps(original)
    def forward(input_ids: Any, positions: Any, forward_batch: Any, *more: Any, **named: Any) -> Any:
        if forward_batch.forward_mode.is_decode() and named.get("input_embeds") is None:
            named["input_embeds"] = steps.inputs(embed, input_ids, forward_batch.req_pool_indices)
        return original(input_ids, positions, forward_batch, *more, **named)

    model.forward = forward


def hooks() -> list[tuple[str, str, Callable[..., Any]]]:
    return [("sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs", "BEFORE", put_in)]


def begin(steps: Steps, request: Any, asked: dict[str, Any]) -> None:
    """A new request with steps. Its generated rows don't follow from tokens, so none of their pages is ever shared.

    Raises:
        ForwardFailed: the hook raised.
    """
    try:
        request.omni_state = steps.hook.begin(asked)
    except Exception as error:
        raise forward_failed(f"the step hook {steps.name}", error, steps.table.device) from error
    request.omni_fed = []
    request.omni_chain.limit = len(request.origin_input_ids)


def feed_again(request: Any) -> None:
    """A retracted request computes its tokens anew: rows that came from embeddings come from them again."""
    import torch
    from sglang.srt.managers.embed_types import PositionalEmbeds

    del request.omni_fed[len(request.output_ids) :]
    start = len(request.origin_input_ids)
    fed = [(start + at, rows) for at, rows in enumerate(request.omni_fed) if rows is not None]
    if fed:
        given = request.__dict__.setdefault("omni_given", request.positional_embed_overrides)
        places = [*(given.positions if given is not None else ()), *(place for place, _ in fed)]
        rows = [*(given.embeds if given is not None else ()), *(row for _, row in fed)]
        request.positional_embed_overrides = PositionalEmbeds(
            embeds=torch.stack([row.float().cpu() for row in rows]), positions=places
        )
