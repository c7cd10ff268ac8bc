"""Fixed-row forwards: rows given as embeddings, whose KV is written over at the same places again and again.

A denoise step is such a forward. Its rows stand behind a cached context of tokens, see all of it and, where their flag
says so, each other in both directions; a row that is causal sees the rows before it only. The context is found in the
prefix cache like any prompt, what of it is missing is computed by SGLang like any prefill, and its pages are shared;
the rows' pages belong to the session until it closes and are never shared. Steps of several sessions that are there at
once run as one forward (`rows_forward.py`), between two steps of SGLang's loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_flow.compute.errors import BadRequest, EngineFull
from omni_flow.compute.prefix import PageChain, match_end
from omni_flow.compute.sglang.allocator import own_pages
from omni_flow.compute.sglang.failures import forward_failed
from omni_flow.compute.sglang.rows_forward import RowsForward
from omni_flow.compute.sglang.rows_inputs import batches
from omni_flow.compute.sglang.shared_rows import SharedRows
from omni_flow.compute.sglang.takeover import current
from omni_flow.compute.sglang.wire import FixedOpen, FixedOpened, FixedOut, FixedStep, Media, Refused
from omni_flow.data.identity import MediaDigest, MediaSpan

if TYPE_CHECKING:
    import torch


class Session:
    """The rows of one user behind one context.

    Args:
        number: names it.
        request: SGLang's request that stands for context and rows.
        context: tokens before the rows.
        written: tokens whose KV is there.
        shared: what goes into a step and comes out of it.
    """

    __slots__ = ("context", "number", "places", "request", "rows", "shared", "written")

    def __init__(self, number: int, request: Any, context: int, rows: int, written: int, shared: SharedRows) -> None:
        self.number = number
        self.shared = shared
        self.request = request
        self.context = context
        self.rows = rows
        self.written = written
        self.places: torch.Tensor  # see `rows_inputs.Placed`

    @property
    def held(self) -> int:
        """Pages with content that is not sealed."""
        return len(own_pages(self.request))


class FixedRows:
    """All sessions of an engine.

    Args:
        scheduler: SGLang's, started.
        graph: see `RowsForward`.
    """

    def __init__(self, scheduler: Any, graph: bool) -> None:
        self.scheduler = scheduler
        self.runner = scheduler.tp_worker.model_runner
        self.forward = RowsForward(self.runner, graph)
        self.sessions: dict[int, Session] = {}

    @property
    def held_pages(self) -> int:
        """Pages that sessions hold, which SGLang's leak check must know of."""
        return sum(session.held for session in self.sessions.values())

    def open(self, asked: FixedOpen) -> FixedOpened:
        """
        Raises:
            BadRequest: more than the model or the pool can hold, with numbers; a model with M-RoPE.
            EngineFull: no room for it now.
        """
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        takeover, scheduler = current(), self.scheduler
        book, size = takeover.book, takeover.page_size
        ids = array("q", asked.ids)
        context, total = len(ids), len(ids) + asked.rows
        if scheduler.model_config.model_is_mrope:
            raise BadRequest("fixed rows of a model with M-RoPE", "rows have one position each; none is known for it")
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
        if asked.media:
            request.positional_embed_overrides = embeddings(asked.media)
        media = [MediaSpan(m.start, m.length, MediaDigest(m.digest)) for m in asked.media]
        request.omni_chain = chain = PageChain(takeover.root_of(asked.tenant), media)
        chain.limit = context
        node = book.match(chain.upto(ids, context, size))
        while node.parent is not None and node.depth * size > match_end(node.depth * size, media, size, takeover.rule):
            node = node.parent
        shared = SharedRows(scheduler.inlet.rows, asked.at, asked.rows, self.runner.model_config.hidden_size)
        book.lock(node)
        missing = pages - node.depth
        promised = self._promised()
        wanted = missing + promised
        if book.available < wanted:
            book.evict(wanted - book.available)
        if book.available < wanted or scheduler.req_to_token_pool.alloc([request]) is None:
            book.unlock(node)
            raise EngineFull(
                f"{missing} pages and a row wanted, {book.available} pages left, {promised} of them promised to others",
                "wait for others to end",
            )
        request.last_node = node
        own_pages(request).extend(book.take(missing))
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.kv_committed_len = 1  # SGLang asks that a request with a row has something in it
        session = Session(asked.number, request, context, asked.rows, node.depth * size, shared)
        self.sessions[asked.number] = session
        self._write_places(session)
        return FixedOpened(asked.number, session.written)

    def _promised(self) -> int:
        """Pages that a prompt of which some chunks are computed still needs: SGLang can't take it back any more."""
        request = self.scheduler.chunked_req
        if request is None:
            return 0
        size = current().page_size
        pages: int = len(request.full_untruncated_fill_ids) // size + 1 - request.last_node.depth
        return max(pages - len(own_pages(request)), 0)

    def _write_places(self, session: Session) -> None:
        """Where all tokens and rows lie, for the rows and in SGLang's table."""
        import torch

        size, request = current().page_size, session.request
        pages = np.asarray([*request.last_node.chain(), *own_pages(request)], np.int64)
        positions = np.arange(session.context + session.rows)
        places = torch.from_numpy(pages[positions // size] * size + positions % size).to(self.runner.device)
        self.scheduler.req_to_token_pool.req_to_token[request.req_pool_idx, : len(positions)] = places.to(torch.int32)
        session.places = places

    def check(self, step: FixedStep) -> None:
        """
        Raises:
            BadRequest: no session, or not a flag for each of its rows.
        """
        session = self.sessions.get(step.number)
        if session is None:
            raise BadRequest(f"no fixed-row session {step.number}", "open one")
        if len(step.causal) not in (0, session.rows):
            raise BadRequest(f"{len(step.causal)} flags for {session.rows} rows", "give one per row")

    def step(self, steps: Sequence[FixedStep]) -> list[FixedOut | Refused]:
        """A forward over the rows of these sessions, all checked; several where they are too many for one, or a session
        is there twice. Where one raises its steps are refused; they may be tried again."""
        out: list[FixedOut | Refused] = []
        with self._behind_the_last_batch():
            for some in batches([(step.number, self.sessions[step.number].rows) for step in steps]):
                out += self._try(steps[some])
        return out

    def _try(self, steps: Sequence[FixedStep]) -> Sequence[FixedOut | Refused]:
        try:
            return self._step(steps)
        except Exception as error:
            what = f"the fixed-row forward of {type(self.runner.model).__name__}"
            failed = forward_failed(what, error, self.runner.device)
            return [Refused.of(step.number, failed) for step in steps]

    def _step(self, steps: Sequence[FixedStep]) -> list[FixedOut]:
        import torch

        sessions = [self.sessions[step.number] for step in steps]
        self._write_contexts(sessions)
        given = [torch.from_numpy(session.shared.given) for session in sessions]
        rows = given[0] if len(given) == 1 else torch.cat(given)
        causal = [step.causal or bytes(session.rows) for step, session in zip(steps, sessions, strict=True)]
        hidden = self.forward.run(sessions, rows, causal).numpy()
        ends = list(accumulate(session.rows for session in sessions))
        for session, part in zip(sessions, np.split(hidden, ends[:-1]), strict=True):
            session.shared.made[:] = part
        return [FixedOut(step.number) for step in steps]

    def _behind_the_last_batch(self) -> AbstractContextManager[None]:
        """With overlap, SGLang's forwards have a stream of their own, and the last one may still run."""
        scheduler = self.scheduler
        if not scheduler.enable_overlap:
            return nullcontext()
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        stream: AbstractContextManager[None] = scheduler.forward_stream_ctx
        return stream

    def _write_contexts(self, sessions: Sequence[Session]) -> None:
        """Compute what is missing of contexts, as a prefill, and publish their full pages."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        new = [session for session in sessions if session.written < session.context]
        if not new:
            return
        batch = self._prefill(new)
        with torch.inference_mode():
            self.runner.forward(ForwardBatch.init_new(batch, self.runner, return_hidden_states_before_norm=False))
        torch.get_device_module(self.runner.device).synchronize()  # nobody may find a page that is not written yet
        for session in new:
            self._publish(session)

    def _prefill(self, sessions: Sequence[Session]) -> Any:
        """SGLang's batch of what is missing of these contexts."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        scheduler = self.scheduler
        for session in sessions:
            session.request.prefix_indices = session.places[: session.written]
            session.request.set_extend_range(session.written, session.context)
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

    def _publish(self, session: Session) -> None:
        """The context is computed: whoever asks for its full pages finds them."""
        request, book = session.request, current().book
        tree: Any = self.scheduler.tree_cache
        node = tree.seal_prefix(request, request.origin_input_ids, session.context)
        book.lock(node)
        book.unlock(request.last_node)
        request.last_node = node
        session.written = session.context
        self._write_places(session)

    def close(self, number: int) -> None:
        """Give everything of a session back."""
        session = self.sessions.pop(number, None)
        if session is None:
            return
        session.shared.give_back()
        request, book = session.request, current().book
        book.give(own_pages(request))
        own_pages(request).clear()
        book.unlock(request.last_node)
        self.scheduler.req_to_token_pool.free(request)


def wait_for_rows(retracted: tuple[list[Any], float, list[Any]], *_: Any) -> tuple[list[Any], float, list[Any]]:
    """After SGLang took requests back: the last of all, which it would end, waits like the others while fixed rows have
    the room."""
    taken_back, ratio, ended = retracted
    fixed = current().fixed
    asked = fixed.scheduler.outlet.requests  # one that was cancelled is not among them
    if not fixed.sessions or any(request.rid not in asked for request in ended):
        return retracted
    for request in ended:
        request.to_finish = None
    return [*taken_back, *ended], ratio, []


def embeddings(media: Sequence[Media]) -> Any:
    """Embeddings in a context, as SGLang's prefill takes them."""
    import torch
    from sglang.srt.managers.embed_types import PositionalEmbeds

    rows = [torch.frombuffer(bytearray(span.rows), dtype=torch.float32).view(span.length, -1) for span in media]
    places = [span.start + at for span in media for at in range(span.length)]
    return PositionalEmbeds(embeds=torch.cat(rows), positions=places)
