"""Our sampler inside SGLang: the rows of a batch travel with SGLang's `SamplingBatchInfo`, its sampler is replaced.

Grammar masks are made by SGLang (xgrammar) and applied to the logits before this sampler sees them; ends of requests
(stop tokens and strings, lengths) are found by SGLang's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omni_flow.compute.sampling import Sampling

_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo."


def sampling_of(request: Any) -> Sampling:
    """The parameters of a request of SGLang's; requests that SGLang makes itself (warm-up) have none of ours."""
    given: Sampling | None = request.__dict__.get("omni_sampling")
    return given if given is not None else Sampling(temperature=0.0, max_tokens=1 << 20)


def _row(request: Any, vocabulary: int, device: Any) -> Any:
    from omni_flow.compute.sampler import History, Row

    sampling = sampling_of(request)
    history = None
    if sampling.penalised or any(len(word) > 1 for word in sampling.bad_words):
        # made anew for each prefill: a middle chunk draws a token that is thrown away, a retracted request starts over
        history = History(request.origin_input_ids, request.output_ids, vocabulary, device)
    ends = sampling.stop_token_ids if sampling.ignore_eos else (*end_tokens(request), *sampling.stop_token_ids)
    wants = request.__dict__.get("omni_wants", (False, False))
    return Row(
        sampling,
        ends,
        len(request.origin_input_ids),
        history,
        logits=wants[0],
        hidden=wants[1],
        request=request if "omni_state" in request.__dict__ else None,
        place=request.req_pool_idx,
        partial=request.extend_range.end < len(request.full_untruncated_fill_ids),
    )


def end_tokens(request: Any) -> set[int]:
    """By which SGLang ends a request: those of the checkpoint, and of its tokenizer."""
    tokenizer = request.tokenizer
    own = () if tokenizer is None else (tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ()))
    return {token for token in (*(request.eos_token_ids or ()), *own) if token is not None}


def from_batch(info: Any, batch: Any, vocabulary: int) -> None:
    """Replaces `adjusted_from_schedule_batch`, SGLang's placeholder for this."""
    from omni_flow.compute.sampler import Batch

    info.omni = Batch(tuple(_row(request, vocabulary, batch.device) for request in batch.reqs))


def filter_batch(info: Any, keep: list[int], _on_device: Any) -> None:
    """Replaces `adjusted_filter_batch`."""
    info.omni = info.omni.keep(keep)


def merge_batch(info: Any, other: Any) -> None:
    """Replaces `adjusted_merge_batch`."""
    info.omni = info.omni.join(other.omni)


def copy_batch(copied: Any, info: Any) -> Any:
    """After `copy_for_forward`, which copies declared fields only."""
    copied.omni = info.omni
    return copied


def hooks() -> list[tuple[str, str, Callable[..., Any]]]:
    return [
        (_INFO + "adjusted_from_schedule_batch", "REPLACE", from_batch),
        (_INFO + "adjusted_filter_batch", "REPLACE", filter_batch),
        (_INFO + "adjusted_merge_batch", "REPLACE", merge_batch),
        (_INFO + "copy_for_forward", "AFTER", copy_batch),
    ]


def make_sampler() -> Any:
    """Factory for SGLang's registry of samplers."""
    from sglang.srt.layers.sampler import Sampler

    from omni_flow.compute.sampler import sample
    from omni_flow.compute.sglang.step_hook import after_sampling
    from omni_flow.compute.sglang.takeover import current

    class OmniSampler(Sampler):  # type: ignore[misc]
        """See the module."""

        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: Any,
            token_ids_logprobs: Any,
            positions: Any,
        ) -> Any:
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
            chosen = sample(logits, sampling_info.omni, positions)
            if return_logprob:
                logprobs = chosen.logprobs if chosen.logprobs is not None else logits.float().log_softmax(-1)
                self.output_logprob_processor.compute_logprobs(
                    logprobs, top_logprobs_nums, token_ids_logprobs, chosen.tokens
                ).write_output_to(logits_output)
            tokens = after_sampling(current().steps, logits_output, sampling_info.omni, chosen.tokens)
            self._sync_token_ids_across_tp(tokens, sampling_info)
            return tokens

    return OmniSampler()
