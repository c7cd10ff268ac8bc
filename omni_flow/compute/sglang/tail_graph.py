"""Short extends over a cached prefix, run as rows of a captured decode step.

What is left of a prompt after a cache hit is at most a page and a bit. SGLang runs it as an extend: launched kernel by
kernel, and its attention works on one query block per head, whatever the length of the prefix. The same rows are rows
of a decode step: row i of a request stands at its own position, sees everything up to itself, and a decode step writes
the keys of all its rows in a layer before it attends. So they replay a decode graph that is there anyhow, whose
attention is split over the prefix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


def fits(runner: Any, batch: Any) -> bool:
    """Whether a forward is a short extend whose rows may run as a decode step."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    graphs = getattr(runner, "decode_cuda_graph_runner", None)  # not there yet while SGLang starts
    return (
        batch.forward_mode == ForwardMode.EXTEND
        and graphs is not None
        and len(batch.input_ids) <= getattr(graphs, "max_bs", 0)
        and all(batch.extend_prefix_lens_cpu)
        and not batch.return_logprob
        and batch.capture_hidden_mode in (None, CaptureHiddenMode.NULL)
        and batch.input_embeds is None
        and batch.replace_embeds is None
        and batch.spec_info is None
    )


def as_decode(batch: Any) -> tuple[Any, list[int]]:
    """The batch as a decode step with one row per new token, and the row of each request's last token."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    lengths: list[int] = []
    owners: list[int] = []
    last: list[int] = []
    for at, (prefix, count) in enumerate(zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)):
        lengths += range(prefix + 1, prefix + count + 1)
        owners += [at] * count
        last.append(len(lengths) - 1)
    rows = copy.copy(batch)
    device = batch.seq_lens.device
    columns = torch.tensor([lengths, owners], dtype=torch.int64).pin_memory().to(device, non_blocking=True)
    rows.forward_mode = ForwardMode.DECODE
    rows.batch_size = len(lengths)
    rows.seq_lens = columns[0].to(batch.seq_lens.dtype)
    rows.seq_lens_cpu = torch.tensor(lengths, dtype=batch.seq_lens_cpu.dtype)
    rows.seq_lens_sum = sum(lengths)
    rows.orig_seq_lens = rows.seq_lens if batch.orig_seq_lens is None else rows.seq_lens.to(batch.orig_seq_lens.dtype)
    rows.req_pool_indices = batch.req_pool_indices[columns[1]]
    for name in ("seq_lens", "prefix_lens", "start_loc", "num_tokens"):
        setattr(rows, f"extend_{name}", None)
    rows.extend_seq_lens_cpu = rows.extend_prefix_lens_cpu = rows.extend_logprob_start_lens_cpu = None
    return rows, last


def forward(original: Callable[..., Any], runner: Any, batch: Any, *more: Any, **named: Any) -> Any:
    """Hook around `ModelRunner._forward_raw`."""
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    if not fits(runner, batch):
        return original(runner, batch, *more, **named)
    rows, last = as_decode(batch)
    made = original(runner, rows, *more, **named)
    output = made.logits_output
    at = torch.tensor(last).pin_memory().to(batch.seq_lens.device, non_blocking=True)
    output.next_token_logits = output.next_token_logits[at]
    return ModelRunnerOutput(logits_output=output, can_run_graph=made.can_run_graph)


def hooks() -> list[tuple[str, str, Callable[..., Any]]]:
    return [("sglang.srt.model_executor.model_runner.ModelRunner._forward_raw", "AROUND", forward)]
