"""SGLang's scheduler with another way in and out: messages of `wire.py` in place of ZMQ to SGLang's front.

Batching, chunked prefill, retraction, overlap and the event loop are SGLang's.
"""

from __future__ import annotations

import select
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Final

import numpy as np

from omni_flow.compute.errors import ComputeError
from omni_flow.compute.prefix import PageChain, marks
from omni_flow.compute.sglang import step_hook
from omni_flow.compute.sglang.fixed_rows import embeddings
from omni_flow.compute.sglang.pagesource import PoolPages
from omni_flow.compute.sglang.takeover import current
from omni_flow.compute.sglang.wire import (
    AskStats,
    Cancel,
    End,
    EndSession,
    FixedClose,
    FixedOpen,
    FixedStep,
    FromEngine,
    Generate,
    Inlet,
    Refused,
    Shutdown,
    Stats,
    Step,
)
from omni_flow.data.identity import MediaDigest, MediaSpan
from omni_flow.data.messages import L2, L3

AWAKE_S: Final = 1.0
"""How long an engine on a GPU stays awake without work."""


class Sleeper:
    """Waits on the socket while there is nothing to do, in place of SGLang's poll of ZMQ sockets.

    Args:
        awake: seconds after the last work in which it looks again at once instead of waiting: waking a process up
            costs the next request more than looking costs.
    """

    def __init__(self, inlet: Inlet, awake: float) -> None:
        self._inlet = inlet
        self._awake = awake
        self._until = 0.0
        self._poll = select.poll()
        self._poll.register(inlet.fileno(), select.POLLIN)
        loader = current().loader
        if loader is not None:
            self._poll.register(loader.fileno(), select.POLLIN)

    def worked(self) -> None:
        """There is or was something to do."""
        self._until = time.monotonic() + self._awake

    def maybe_sleep(self) -> None:
        if not self._inlet.closed:
            self._poll.poll(0 if self._awake and time.monotonic() < self._until else 1000)


class Endless:
    """A tokenizer without an end token. SGLang's own `ignore_eos` would ignore the request's stop tokens as well."""

    eos_token_id = None
    additional_stop_token_ids = None

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def rid_of(number: int) -> str:
    """SGLang's name of a request. Of fixed width: SGLang aborts every request whose name begins with the one given."""
    return f"{number:016x}"


def sampling_params(message: Generate) -> Any:
    """SGLang's parameters: what ends a request and what constrains it. The choice of tokens is ours."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    given = message.sampling
    return SamplingParams(
        max_new_tokens=given.max_tokens,
        temperature=given.temperature,
        stop=list(given.stop) or None,
        stop_token_ids=set(given.stop_token_ids) or None,
        json_schema=given.json_schema,
        regex=given.regex,
        ebnf=given.grammar,
        min_new_tokens=0,
    )


def to_sglang(message: Generate) -> Any:
    """The request as SGLang's front would send it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    logprobs = message.sampling.logprobs
    return TokenizedGenerateReqInput(
        rid=rid_of(message.number),
        input_text=None,
        input_ids=array("q", message.ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling_params(message),
        return_logprob=logprobs is not None or message.prompt_logprobs,
        logprob_start_len=0 if message.prompt_logprobs else -1,
        top_logprobs_num=logprobs or 0,
        token_ids_logprob=None,
        stream=True,
        priority=message.priority,
        positional_embed_overrides=embeddings(message.media) if message.media else None,
    )


def chain_for(message: Generate) -> PageChain:
    """An empty chain for the pages of a request."""
    media = [MediaSpan(m.start, m.length, MediaDigest(m.digest)) for m in message.media]
    return PageChain(current().root_of(message.tenant), media)


@dataclass(slots=True)
class Course:
    """What is noted of a request under way.

    Args:
        chain: of its pages.
        lower: places of the pages of its prompt that were in no higher tier than L2, or than L3, when it came.
    """

    chain: PageChain
    lower: tuple[list[int], list[int]] = ([], [])

    def hits(self, cached: int, page_size: int) -> tuple[int, int, int]:
        """`cached` tokens by the tier they were found in."""
        below = [sum(at < cached // page_size for at in places) * page_size for places in self.lower]
        return cached - sum(below), below[0], below[1]


class Outlet:
    """Where SGLang sends results: turns them into messages. It has the method of SGLang's sender.

    Args:
        settle: called before tokens go out: the pages they were computed with are to be found by then.
    """

    def __init__(self, inlet: Inlet, settle: Callable[[], None]) -> None:
        self._inlet = inlet
        self._settle = settle
        self.requests: dict[str, Generate] = {}
        self.courses: dict[str, Course] = {}
        self._prompt: dict[str, list[float]] = {}

    def send_output(self, output: Any, _cause: Any = None) -> None:
        kind = type(output).__name__
        if kind == "AbortReq":
            self._refuse(output.rid, output.finished_reason or {"message": output.abort_message or "aborted"})
        elif kind == "BatchTokenIDOutput":
            out: list[FromEngine] = []
            ended: list[tuple[str, PageChain]] = []
            for at, rid in enumerate(output.rids):
                self._one(output, at, rid, out, ended)
            self._settle()
            keeper = current().keeper
            if keeper is not None:
                for session, chain in ended:
                    keeper.turn_ended(session, chain, time.monotonic())
            if out:
                self._inlet.send(*out)
        elif kind not in ("FreezeGCReq", "HealthCheckOutput", "FlushCacheReqOutput"):
            raise TypeError(f"SGLang sent {kind}, which this outlet doesn't know")

    def forget(self, rid: str) -> Generate | None:
        """A request is over; nothing of it goes out any more."""
        self.courses.pop(rid, None)
        self._prompt.pop(rid, None)
        return self.requests.pop(rid, None)

    def _refuse(self, rid: str, reason: dict[str, Any]) -> None:
        asked = self.forget(rid)
        if asked is not None:
            message = str(reason.get("message") or reason)
            full = reason.get("status_code") == HTTPStatus.SERVICE_UNAVAILABLE
            kind = "EngineFull" if full else "BadRequest"
            self._inlet.send(Refused(asked.number, kind, message, ""))

    def _one(self, output: Any, at: int, rid: str, out: list[FromEngine], ended: list[tuple[str, PageChain]]) -> None:
        asked = self.requests.get(rid)
        if asked is None:
            return
        tokens = list(output.output_ids[at])
        reason = output.finished_reasons[at]
        if reason is not None and reason["type"] == "abort":
            if reason.get("message") == "cancelled":
                self.forget(rid)
                return
            self._refuse(rid, reason)
            return
        step = Step(asked.number, tokens, [], [], [], [])
        if asked.sampling.logprobs is not None:
            step.logprobs = [float(v) for v in output.output_token_logprobs_val[at]]
            if asked.sampling.logprobs:
                pairs = zip(output.output_top_logprobs_val[at], output.output_top_logprobs_idx[at], strict=True)
                step.top = [[(int(i), float(v)) for v, i in zip(*pair, strict=True)] for pair in pairs]
        if asked.logits or asked.hidden or asked.steps is not None:
            info = output.customized_info
            step.logits = [row.numpy().tobytes() for row in info["logits"][at] if row is not None]
            step.hidden = [row.numpy().tobytes() for row in info["hidden"][at] if row is not None]
            step.emitted = list(info["emitted"][at])
        if asked.prompt_logprobs and output.input_token_logprobs_val[at]:
            self._prompt[rid] = [float(value) for value in output.input_token_logprobs_val[at][1:]]
        if tokens:
            out.append(step)
        if reason is not None:
            course, size = self.courses[rid], current().page_size
            prompt_logprobs = self._prompt.get(rid, [])
            self.forget(rid)
            if asked.session:
                ended.append((asked.session, course.chain))
            prompt, cached = output.prompt_tokens[at], output.cached_tokens[at]
            out.append(
                End(
                    asked.number,
                    reason["type"],
                    prompt,
                    cached,
                    output.completion_tokens[at],
                    prompt_logprobs,
                    course.hits(cached, size),
                    marks(course.chain.keys[: prompt // size], size) if current().arena is not None else [],
                )
            )


@cache
def scheduler_class() -> type:
    """The class; made on first use because its base needs sglang."""
    from sglang.srt.managers.io_struct import AbortReq, ShutdownReq
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    class Receiver(SchedulerRequestReceiver):  # type: ignore[misc]
        """Takes requests from the socket of this engine."""

        __slots__ = ()

        def _pull_raw_reqs(self) -> list[Any]:
            pulled: list[Any] = self.recv_from_tokenizer()
            return pulled

    class EngineScheduler(Scheduler):  # type: ignore[misc]
        """See the module. `inlet` is set on the class before one is made: SGLang's constructor does everything."""

        inlet: Inlet
        _chains: dict[str, PageChain]
        _lower: dict[str, Callable[[], dict[int, int]]]

        def init_ipc_channels(self, port_args: Any) -> None:
            self.outlet = Outlet(self.inlet, lambda: self.tree_cache.settle())
            self._chains, self._lower = {}, {}
            self.load_snapshot_writer = None
            self.recv_from_tokenizer = self._pull
            self.ipc_channels = SchedulerIpcChannels(
                recv_from_tokenizer=self._pull,
                recv_from_rpc=None,
                send_to_tokenizer=self.outlet,
                send_to_detokenizer=self.outlet,
                send_metrics_from_scheduler=None,
            )

        def init_idle_sleeper(self) -> None:
            self.idle_sleeper = Sleeper(self.inlet, 0.0 if current().cpu else AWAKE_S)

        def init_request_receiver(self) -> None:
            super().init_request_receiver()
            made: Any = vars(self)["request_receiver"]
            self.request_receiver = Receiver(**{name: getattr(made, name) for name in type(made).__dataclass_fields__})

        def _pull(self) -> list[Any]:
            """Messages since the last call, as SGLang's."""
            out: list[Any] = []
            fixed: list[FixedStep] = []
            new: list[Generate] = []
            self._loaded()
            keeper = current().keeper
            if keeper is not None:
                keeper.expire(time.monotonic())
            messages = self.inlet.poll()
            if messages or self.last_batch is not None:
                self.idle_sleeper.worked()
            for message in messages:
                if isinstance(message, Generate):
                    request = to_sglang(message)
                    request.sampling_params.normalize(self.tokenizer)
                    self.outlet.requests[request.rid] = message
                    out.append(request)
                    new.append(message)
                elif isinstance(message, Cancel):
                    # nothing of it goes out any more; its last step may still be running
                    if self.outlet.forget(rid_of(message.number)) is not None:
                        out.append(AbortReq(rid=rid_of(message.number)))
                elif isinstance(message, FixedStep):
                    fixed.append(message)
                elif isinstance(message, FixedOpen | FixedClose):
                    self._fixed_session(message)
                elif isinstance(message, EndSession):
                    if keeper is not None:
                        keeper.end(message.session)
                elif isinstance(message, AskStats):
                    self.inlet.send(Stats(message.number, self.counts()))
                elif isinstance(message, Shutdown):
                    out.append(ShutdownReq())
            if new:
                self._expect(new)
            if fixed:
                self._fixed_steps(fixed)
            if self.inlet.closed:
                out.append(ShutdownReq())
            return out

        def _expect(self, new: list[Generate]) -> None:
            """Name the pages of requests that have come and have them looked up, while SGLang takes the requests in."""
            takeover = current()
            source = takeover.book.source
            for message in new:
                chain = chain_for(message)
                ids = np.frombuffer(message.ids, np.int64)
                chain.upto(ids, len(ids) - 1, takeover.page_size)
                self._chains[rid_of(message.number)] = chain
                if takeover.loader is not None and isinstance(source, PoolPages):
                    self._lower[rid_of(message.number)] = source.lower(chain.keys)
            self.tree_cache.lookahead.ask((chain.keys for chain in self._chains.values()), self.forward_ct)

        def process_input_requests(self, recv_reqs: list[Any]) -> None:
            super().process_input_requests(recv_reqs)
            self._chains.clear()  # who was refused needs none
            self._lower.clear()

        def get_next_batch_to_run(self, *arguments: Any, **named: Any) -> Any:
            plan = super().get_next_batch_to_run(*arguments, **named)
            batch = plan.batch_to_run
            if self.waiting_queue and batch is not None and batch.forward_mode.is_extend():
                self.tree_cache.lookahead.ask_for(self.waiting_queue, self.forward_ct + 1)
            return plan

        def process_batch_result(self, batch: Any, result: Any) -> None:
            super().process_batch_result(batch, result)
            self.tree_cache.settle()

        def _fixed_session(self, message: FixedOpen | FixedClose) -> None:
            sessions = current().fixed
            if isinstance(message, FixedClose):
                sessions.close(message.number)
                return
            try:
                self.inlet.send(sessions.open(message))
            except ComputeError as error:
                self.inlet.send(Refused(message.number, type(error).__name__, error.message, error.mend))

        def _fixed_steps(self, steps: list[FixedStep]) -> None:
            """All steps that are there run as one forward; one that is wrong is refused and the others run."""
            sessions = current().fixed
            good = []
            for step in steps:
                try:
                    sessions.check(step)
                    good.append(step)
                except ComputeError as error:
                    self.inlet.send(Refused(step.number, type(error).__name__, error.message, error.mend))
            if good:
                self.inlet.send(*sessions.step(good))

        def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
            message = self.outlet.requests.get(req.rid)
            if message is not None and "omni_chain" not in req.__dict__:
                takeover = current()
                # one that waited for its grammar comes later
                req.omni_chain = self._chains.get(req.rid) or chain_for(message)
                self.outlet.courses[req.rid] = Course(req.omni_chain)
                req.omni_sampling = message.sampling
                if message.steps is not None:
                    step_hook.begin(takeover.steps, req, message.steps)
                if message.sampling.ignore_eos:
                    req.eos_token_ids = None
                    req.tokenizer = Endless(req.tokenizer) if req.tokenizer is not None else None
                req.omni_wants = (message.logits, message.hidden)
                if self._load_first(req):
                    return
            elif "omni_fed" in req.__dict__:
                step_hook.feed_again(req)
            super()._add_request_to_queue(req, is_retracted)

        def _load_first(self, req: Any) -> bool:
            """Whether the request waits for cached pages that lie in lower tiers."""
            takeover = current()
            source = takeover.book.source
            if takeover.loader is None or not isinstance(source, PoolPages):
                return False
            tokens = req.origin_input_ids
            keys = req.omni_chain.upto(tokens, len(tokens) - 1, takeover.page_size)
            missing = (self._lower.get(req.rid) or source.lower(keys))()
            if missing:
                course = self.outlet.courses[req.rid]
                course.lower = [at for at, t in missing.items() if t & L2], [at for at, t in missing.items() if t == L3]
                takeover.loader.order(req, [keys[at] for at in missing])
            return bool(missing)

        def _loaded(self) -> None:
            """Requests whose pages have come join the queue."""
            loader = current().loader
            if loader is None:
                return
            ready = loader.ready()
            if ready:
                self.tree_cache.lookahead.forget()
            for request in ready:
                if request.rid in self.outlet.requests:  # else it was cancelled meanwhile
                    super()._add_request_to_queue(request)

        def counts(self) -> dict[str, int]:
            """See `Engine.stats`."""
            takeover = current()
            book = takeover.book
            running = self.running_batch.reqs if self.running_batch is not None else []
            return {
                "running": sum(not request.finished() for request in running),
                "waiting": len(self.waiting_queue),
                "quota": book.source.quota,
                "available": book.available,
                "held": book.held,
                "pinned": book.pinned,
                "idle": book.idle,
                "locked": book.locked,
                "leased": book.leased,
                "loading": takeover.loader.waiting if takeover.loader is not None else 0,
                "loaded_pages": takeover.loader.loaded_pages if takeover.loader is not None else 0,
                "sessions": len(takeover.keeper) if takeover.keeper is not None else 0,
                "weights_mapped": int(takeover.weights is not None and not takeover.weights.loaded_here),
                **current().counters,
            }

    return EngineScheduler
