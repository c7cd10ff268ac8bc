"""The forward of fixed rows: SGLang's model over `RowInputs`, on a GPU as a captured CUDA graph.

Launched kernel by kernel, a step of a small batch takes as long as the launches, whatever its size; replayed, it takes
as long as its kernels. Nothing that changes between steps is in the graph: embeddings, places, lengths and flags are
read from the inputs, the arena never moves. So there is one graph for each size, captured when it is first needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_flow.compute.sglang.rows_inputs import SEQUENCES, Placed, Placement, RowInputs, size_for
from omni_flow.compute.sglang.takeover import current

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Captured:
    """A function as a CUDA graph. What a call returns is valid until the next graph of the same pool runs.

    Args:
        graph: the capture of `function`.
        function: kept, not called: the graph reads the tensors it holds by their addresses, which the allocator would
            give away.
        out: what the graph writes.
    """

    graph: torch.cuda.CUDAGraph
    function: Callable[[], torch.Tensor]
    out: torch.Tensor

    @classmethod
    def of(cls, function: Callable[[], torch.Tensor], pool: Any) -> Captured:
        """Capture a function, with memory from `pool`, a graph pool's handle."""
        import torch
        from sglang.srt.model_executor.runner import model_capture_mode

        with model_capture_mode():
            for _ in range(2):  # kernels are compiled and workspaces made on first use, which a capture can't hold
                function()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                out = function()
        return cls(graph, function, out)

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.out


class RowsForward:
    """The forwards of an engine's fixed rows, one for each size.

    Args:
        runner: SGLang's model runner, started.
        graph: replay CUDA graphs; else, as on a CPU, the same function runs eagerly over the same inputs.
    """

    def __init__(self, runner: Any, graph: bool) -> None:
        import torch
        from sglang.srt.layers.radix_attention import RadixAttention

        self._runner = runner
        self._attention = attention_of(runner)
        layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
        self._windows = sorted({layer.sliding_window_size for layer in layers})
        longest = SEQUENCES * runner.model_config.context_len
        self._context = torch.zeros(longest, dtype=torch.int64, device=runner.device)
        self._pool = torch.cuda.graph_pool_handle() if graph else None
        self._forwards: dict[int, tuple[RowInputs, Callable[[], torch.Tensor]]] = {}
        self._placement = Placement()

    def prepare(self, rows: int) -> None:
        """Make the forward for so many rows, so that no step has to wait for it."""
        import torch

        size = size_for(rows)
        if size in self._forwards:
            return
        runner = self._runner
        inputs = RowInputs.empty(size, runner.model_config.hidden_size, runner.dtype, self._windows, self._context)
        self._placement.forget()
        with torch.inference_mode():
            function = self._function(inputs)
            self._forwards[size] = inputs, function if self._pool is None else Captured.of(function, self._pool)
        current().counters["row_sizes"] += 1

    def run(self, sessions: Sequence[Placed], embeds: torch.Tensor, causal: Sequence[bytes]) -> torch.Tensor:
        """One forward.

        Args:
            sessions: as many as `rows_inputs.batches` puts in one forward.
            embeds: float32 (rows of all sessions, hidden size), on the CPU.
            causal: see `RowInputs.place`.

        Returns:
            Hidden states behind the last norm, float32 (rows of all sessions, hidden size), on the CPU.
        """
        import torch

        size = size_for(len(embeds))
        self.prepare(size)
        counters, begin = current().counters, time.perf_counter_ns()
        inputs, function = self._forwards[size]
        with torch.inference_mode():
            self._placement.set(inputs, sessions, causal)
            inputs.embeds[: len(embeds)].copy_(embeds)
            hidden = function()[: len(embeds)].float().cpu()
        counters["row_forwards"] += 1
        counters["row_us"] += (time.perf_counter_ns() - begin) // 1000
        return hidden

    def _function(self, inputs: RowInputs) -> Callable[[], torch.Tensor]:
        """The model over these inputs; SGLang takes them for one request behind one cached token, which makes MLA take
        its absorbed path, and compute the logits of one row."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        size, device = inputs.size, inputs.ids.device
        one, count = torch.tensor([1], device=device), torch.tensor([size], device=device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=inputs.ids,
            req_pool_indices=torch.zeros_like(one),
            seq_lens=one + count,
            seq_lens_cpu=torch.tensor([1 + size]),
            seq_lens_sum=1 + size,
            out_cache_loc=inputs.slots,
            positions=inputs.positions,
            extend_num_tokens=size,
            extend_seq_lens=count,
            extend_prefix_lens=one,
            extend_start_loc=torch.zeros_like(one),
            extend_seq_lens_cpu=[size],
            extend_prefix_lens_cpu=[1],
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        model, attention = self._runner.model, self._attention

        def forward() -> torch.Tensor:
            attention.begin(inputs)
            with forward_context(ForwardContext(attn_backend=attention)):
                # models write into the embeddings they are given
                output = model.forward(inputs.ids, inputs.positions, batch, input_embeds=inputs.embeds.clone())
            hidden: torch.Tensor = output.hidden_states
            return hidden

        return forward


def attention_of(runner: Any) -> Any:
    """The attention backend of fixed rows."""
    if current().cpu:
        from omni_flow.compute.sglang.torch_rows import TorchRows

        return TorchRows(runner)
    from omni_flow.compute.sglang.triton_rows import TritonRows

    return TritonRows(runner)
