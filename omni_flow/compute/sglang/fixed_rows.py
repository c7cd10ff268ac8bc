"""Fixed-row forwards: rows given as embeddings, whose KV is written over at the same places again and again.

A denoise step is such a forward. Its rows stand behind a cached context of tokens, see all of it and, where their flag
says so, each other in both directions; a row that is causal sees the rows before it only. The context is found in the
prefix cache like any prompt, and its pages are shared; the rows' pages belong to the session until it closes and are
never shared. Steps of several sessions that are there at once run as one forward, between two steps of SGLang's loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from omni_flow.compute.errors import BadRequest, EngineFull
from omni_flow.compute.prefix import PageChain, match_end
from omni_flow.compute.sglang.allocator import own_pages
from omni_flow.compute.sglang.step_hook import token_embedding
from omni_flow.compute.sglang.takeover import current
from omni_flow.compute.sglang.wire import FixedOpen, FixedOpened, FixedOut, FixedStep, Media
from omni_flow.data.identity import MediaDigest, MediaSpan


def causal_flags(forward_batch: Any) -> list[list[bool]] | None:
    """Per request of a marked batch a flag for each of its fixed rows, the last of its new ones; None for others."""
    flags: list[list[bool]] | None = getattr(forward_batch, "omni_causal", None)
    return flags


def carry_flags(loaded: Any, _runner: Any, forward_batch: Any, *_: Any, **__: Any) -> Any:
    """After `EagerRunner.load_batch`, which makes a new batch of the declared fields."""
    loaded.omni_causal = causal_flags(forward_batch)
    return loaded


def hooks() -> list[tuple[str, str, Callable[..., Any]]]:
    return [("sglang.srt.model_executor.runner.eager_runner.EagerRunner.load_batch", "AFTER", carry_flags)]


class Session:
    """The rows of one user behind one context.

    Args:
        request: SGLang's request that stands for context and rows.
        context: tokens before the rows.
        media: embeddings in the context.
    """

    __slots__ = ("context", "media", "request", "rows", "written")

    def __init__(self, request: Any, context: int, rows: int, media: Sequence[Media]) -> None:
        self.request = request
        self.context = context
        self.rows = rows
        self.media = media
        self.written = 0  # tokens whose KV is there

    @property
    def held(self) -> int:
        """Pages with content that is not sealed."""
        return len(own_pages(self.request))


class FixedRows:
    """All sessions of an engine.

    Args:
        scheduler: SGLang's, started.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.runner = scheduler.tp_worker.model_runner
        self.sessions: dict[int, Session] = {}
        self._batches: dict[tuple[int, ...], Any] = {}

    @property
    def held_pages(self) -> int:
        """Pages that sessions hold, which SGLang's leak check must know of."""
        return sum(session.held for session in self.sessions.values())

    def open(self, asked: FixedOpen) -> FixedOpened:
        """
        Raises:
            BadRequest: more than the model or the pool can hold, with numbers.
            EngineFull: no room for it now.
        """
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        takeover, scheduler = current(), self.scheduler
        book, size = takeover.book, takeover.page_size
        ids = array("q", asked.ids)
        context, total = len(ids), len(ids) + asked.rows
        pages = -(-total // size)
        if total > scheduler.max_req_input_len or pages > book.source.quota:
            raise BadRequest(
                f"{context} tokens and {asked.rows} rows; model and pool take {scheduler.max_req_input_len}",
                "raise context or max_tokens",
            )
        request = Req(
            f"fixed {asked.number}", None, ids + array("q", [asked.placeholder] * asked.rows),
            SamplingParams(max_new_tokens=1, temperature=0.0), vocab_size=scheduler.model_config.vocab_size,
        )  # fmt: skip
        request.sampling_params.normalize(None)
        media = [MediaSpan(m.start, m.length, MediaDigest(m.digest)) for m in asked.media]
        request.omni_chain = chain = PageChain(takeover.root_of(asked.tenant), media)
        chain.limit = context
        node = book.match(chain.upto(ids, context, size))
        while node.parent is not None and node.depth * size > match_end(node.depth * size, media, size, takeover.rule):
            node = node.parent
        book.lock(node)
        missing = pages - node.depth
        if book.available < missing:
            book.evict(missing - book.available)
        if book.available < missing or scheduler.req_to_token_pool.alloc([request]) is None:
            book.unlock(node)
            raise EngineFull(f"{missing} pages and a row wanted, {book.available} pages left", "wait for others to end")
        request.last_node = node
        own_pages(request).extend(book.take(missing))
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.kv_committed_len = 1  # SGLang asks that a request with a row has something in it
        session = Session(request, context, asked.rows, asked.media)
        session.written = node.depth * size
        self.sessions[asked.number] = session
        self._write_slots(session)
        return FixedOpened(asked.number, session.written)

    def _write_slots(self, session: Session) -> None:
        """The places of all tokens and rows in SGLang's table."""
        import torch

        size, request = current().page_size, session.request
        pages = np.asarray([*request.last_node.chain(), *own_pages(request)], np.int64)
        positions = np.arange(session.context + session.rows)
        slots = torch.from_numpy(pages[positions // size] * size + positions % size).to(self.runner.device, torch.int32)
        self.scheduler.req_to_token_pool.req_to_token[request.req_pool_idx, : len(positions)] = slots

    def check(self, step: FixedStep) -> None:
        """
        Raises:
            BadRequest: rows of another number or width than the session's, or no session.
        """
        session, width = self.sessions.get(step.number), self.runner.model_config.hidden_size
        if session is None:
            raise BadRequest(f"no fixed-row session {step.number}", "open one")
        if len(step.rows) != 4 * session.rows * width or len(step.causal) not in (0, session.rows):
            raise BadRequest(
                f"{len(step.rows)} bytes of rows and {len(step.causal)} flags for {session.rows} rows of {width}",
                "give float32 rows (rows, hidden size) and a flag per row",
            )

    def step(self, steps: Sequence[FixedStep]) -> list[FixedOut]:
        """One forward over the rows of these sessions, all checked."""
        import torch

        sessions = [self.sessions[step.number] for step in steps]
        embeds, flags = [], []
        for step, session in zip(steps, sessions, strict=True):
            rows = torch.frombuffer(bytearray(step.rows), dtype=torch.float32).view(session.rows, -1)
            if session.written < session.context:
                embeds.append(self._context_rows(session))
            embeds.append(rows.to(self.runner.device, self.runner.dtype))
            flags.append([bool(f) for f in step.causal] if step.causal else [False] * session.rows)
        hidden = self._forward(tuple(step.number for step in steps), sessions, torch.cat(embeds), flags)
        out, at = [], 0
        for step, session in zip(steps, sessions, strict=True):
            at += session.context - session.written
            out.append(FixedOut(step.number, hidden[at : at + session.rows].numpy().tobytes()))
            at += session.rows
        for session in sessions:
            if session.written < session.context:
                self._context_done(session)
        return out

    def _context_rows(self, session: Session) -> Any:
        """Embeddings of the context's tokens that are not cached."""
        import torch

        ids = torch.tensor(session.request.origin_input_ids[session.written : session.context])
        rows = token_embedding(self.runner.model)(ids.to(self.runner.device)).clone()
        for media in session.media:
            given = torch.frombuffer(bytearray(media.rows), dtype=torch.float32).view(media.length, -1)
            start = max(media.start, session.written)
            if start < media.start + media.length:
                place = slice(start - session.written, media.start + media.length - session.written)
                rows[place] = given[start - media.start :].to(rows)
        return rows

    def _forward(self, key: tuple[int, ...], sessions: list[Session], embeds: Any, flags: list[list[bool]]) -> Any:
        """Hidden states of all new rows, float32 on the CPU."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

        batch = self._batches.get(key)
        if batch is None:
            batch = self._batch(sessions)
            if all(session.written == session.context for session in sessions):
                self._batches[key] = batch
        forward = ForwardBatch.init_new(
            batch, self.runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
        )
        forward.input_embeds, forward.omni_causal = embeds, flags
        with torch.inference_mode():
            return self.runner.forward(forward).logits_output.hidden_states.float().cpu()

    def _batch(self, sessions: list[Session]) -> Any:
        """SGLang's batch of the rows that are not written for good."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        scheduler = self.scheduler
        table = scheduler.req_to_token_pool.req_to_token
        for session in sessions:
            request = session.request
            request.prefix_indices = table[request.req_pool_idx, : session.written].long()
            request.set_extend_range(session.written, session.context + session.rows)
        batch = ScheduleBatch.init_new(
            reqs=[session.request for session in sessions],
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            model_config=scheduler.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        return batch

    def _context_done(self, session: Session) -> None:
        """The context is computed: its full pages are published."""
        request, book = session.request, current().book
        tree: Any = self.scheduler.tree_cache
        node = tree.seal_prefix(request, request.origin_input_ids, session.context)
        book.lock(node)
        book.unlock(request.last_node)
        request.last_node = node
        session.written = session.context
        self._write_slots(session)

    def close(self, number: int) -> None:
        """Give everything of a session back."""
        session = self.sessions.pop(number, None)
        if session is None:
            return
        request, book = session.request, current().book
        self._batches = {key: batch for key, batch in self._batches.items() if number not in key}
        book.give(own_pages(request))
        own_pages(request).clear()
        book.unlock(request.last_node)
        self.scheduler.req_to_token_pool.free(request)
