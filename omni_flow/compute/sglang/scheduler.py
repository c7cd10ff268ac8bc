"""SGLang's scheduler with another way in and out: messages of `wire.py` in place of ZMQ to SGLang's front.

Batching, chunked prefill, retraction, overlap and the event loop are SGLang's.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np

from omni_flow.compute.errors import ComputeError, EngineFull, ForwardFailed
from omni_flow.compute.prefix import PageChain
from omni_flow.compute.sglang import step_hook
from omni_flow.compute.sglang.outlet import Course, Outlet
from omni_flow.compute.sglang.pagesource import PoolPages, lower
from omni_flow.compute.sglang.requests import Endless, chain_for, rid_of, to_sglang
from omni_flow.compute.sglang.takeover import current
from omni_flow.compute.sglang.wire import (
    AskStats,
    Cancel,
    EndSession,
    FixedClose,
    FixedOpen,
    FixedStep,
    Generate,
    Inlet,
    Refused,
    Shutdown,
    Stats,
)
from omni_flow.data.messages import L1, L2, L3

LOADS: Final = 8
"""How often the pages of a request are brought, where some had gone before all were there, and more are each time."""


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
        self._loader = loader = current().loader
        if loader is not None:
            self._poll.register(loader.fileno(), select.POLLIN)

    def worked(self) -> None:
        """There is or was something to do."""
        self._until = time.monotonic() + self._awake

    def maybe_sleep(self) -> None:
        if self._inlet.closed:
            return
        for fd, _ in self._poll.poll(0 if self._awake and time.monotonic() < self._until else 1000):
            if self._loader is not None and fd == self._loader.fileno() and not self._loader.hear():
                self._poll.unregister(fd)  # it would wake for ever


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
        max_queued_requests: int | None
        _chains: dict[str, PageChain]
        _tiers: dict[str, Callable[[], list[int]]]
        _tried: tuple[object, ...] = ()

        def init_ipc_channels(self, port_args: Any) -> None:
            self.outlet = Outlet(self.inlet, lambda: self.tree_cache.settle())
            self._chains, self._tiers = {}, {}
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
            self.idle_sleeper = Sleeper(self.inlet, current().awake)

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
                    if message.timeline:
                        self.outlet.timelines.begin(request.rid)
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
                    self.outlet.end_session(message.session)
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
            tiered = self._tiered()
            for message in new:
                chain = chain_for(message)
                ids = np.frombuffer(message.ids, np.int64)
                chain.upto(ids, len(ids) - 1, takeover.page_size)
                self._chains[rid_of(message.number)] = chain
                if tiered is not None:
                    self._tiers[rid_of(message.number)] = tiered.tiers(chain.keys)
                self.outlet.timelines.mark(rid_of(message.number), "named")
            if tiered is None:
                self.tree_cache.lookahead.ask((chain.keys for chain in self._chains.values()), self.forward_ct)

        @staticmethod
        def _tiered() -> PoolPages | None:
            """The source of pages, if it has lower tiers."""
            source = current().book.source
            return source if current().loader is not None and isinstance(source, PoolPages) else None

        def process_input_requests(self, recv_reqs: list[Any]) -> None:
            super().process_input_requests(recv_reqs)
            self._chains.clear()  # who was refused needs none
            self._tiers.clear()

        def get_new_batch_prefill(self, running_batch: Any) -> Any:
            # SGLang tries again when somebody who runs ends; where nobody runs, others had the room, as fixed rows may
            if running_batch.batch_is_full and running_batch.is_empty():
                room = self._room()
                running_batch.batch_is_full = room == self._tried
                self._tried = room
            return super().get_new_batch_prefill(running_batch)

        def _room(self) -> tuple[object, ...]:
            """What decides whether the first of those that wait has room."""
            book, queue = current().book, self.waiting_queue
            ends = (queue[0].rid, queue[-1].rid) if queue else ()
            return book.available + book.idle, self.req_to_token_pool.available_size(), len(queue), ends

        def get_next_batch_to_run(self, *arguments: Any, **named: Any) -> Any:
            plan = super().get_next_batch_to_run(*arguments, **named)
            batch = plan.batch_to_run
            if self.waiting_queue and batch is not None and batch.forward_mode.is_extend():
                self.tree_cache.lookahead.ask_for(self.waiting_queue, self.forward_ct + 1)
            return plan

        def run_batch(self, batch: Any, *arguments: Any, **named: Any) -> Any:
            self.outlet.timelines.mark_extends(batch, "prepared")
            result = super().run_batch(batch, *arguments, **named)
            self.outlet.timelines.mark_extends(batch, "launched")
            return result

        def process_batch_result(self, batch: Any, result: Any) -> None:
            self.outlet.timelines.mark_extends(batch, "collected")
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
                self.inlet.send(Refused.of(message.number, error))

        def _fixed_steps(self, steps: list[FixedStep]) -> None:
            """All steps that are there run as one forward; one that is wrong is refused and the others run."""
            sessions = current().fixed
            good = []
            for step in steps:
                try:
                    sessions.check(step)
                    good.append(step)
                except ComputeError as error:
                    self.inlet.send(Refused.of(step.number, error))
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
                    try:
                        step_hook.begin(takeover.steps, req, message.steps)
                    except ForwardFailed as error:
                        self.outlet.refuse(req.rid, error)
                        return
                if message.sampling.ignore_eos:
                    req.eos_token_ids = None
                    req.tokenizer = Endless(req.tokenizer) if req.tokenizer is not None else None
                req.omni_wants = (message.logits, message.hidden)
                if self._load_first(req):
                    return
            elif "omni_fed" in req.__dict__:
                step_hook.feed_again(req)
            self._enqueue(req, is_retracted)

        def _enqueue(self, req: Any, is_retracted: bool = False) -> None:
            super()._add_request_to_queue(req, is_retracted)
            self.outlet.timelines.mark(req.rid, "queued")

        def _abort_on_queued_limit(self, req: Any) -> bool:
            """Where as many wait as may, the last of the smallest priority is refused, which may be one of the queue;
            whether it is `req`. Those whose pages are brought wait too. Whoever was sent back to wait is never refused:
            the first part of its answer has gone out."""
            loader, course, limit = current().loader, self.outlet.courses.get(req.rid), self.max_queued_requests
            waiting = [*self.waiting_queue, *(loader.requests if loader is not None else ())]
            taken_in = req.is_retracted or (course is not None and course.loads)
            if limit is None or len(waiting) < limit or taken_in:
                return False
            smaller = [one for one in waiting if one.priority < req.priority and not one.is_retracted]
            last = max(smaller, key=lambda one: (-one.priority, one.rid), default=req)
            if last in self.waiting_queue:
                self.waiting_queue.remove(last)
            full = EngineFull(f"{len(waiting)} requests wait, the limit is {limit}", "try again, or raise max_waiting")
            self.outlet.refuse(last.rid, full)
            return last is req

        def _load_first(self, req: Any) -> bool:
            """Whether the request waits for cached pages that lie in lower tiers, or was refused instead."""
            tiered = self._tiered()
            if tiered is None or req.to_finish is not None:  # SGLang has refused it and taken its prompt away
                return False
            keys = self.tree_cache.keys_of(req)
            tiers = (self._tiers.get(req.rid) or tiered.tiers(keys))()[: len(keys)]
            missing = lower(tiers)
            absent = {key for key, at in zip(keys, tiers, strict=True) if not at & L1}
            self.tree_cache.lookahead.learn(keys, absent, self.forward_ct)
            self.outlet.timelines.mark(req.rid, "probed")
            if missing and self._abort_on_queued_limit(req):
                return True
            if missing:
                course = self.outlet.courses[req.rid]
                course.lower = [at for at, t in missing.items() if t & L2], [at for at, t in missing.items() if t == L3]
                self._load(req, missing)
            return bool(missing)

        def _load(self, req: Any, missing: Mapping[int, int]) -> None:
            """Order the pages at these places. What precedes them stays pinned meanwhile, and each part that comes is
            pinned then; idle pins make room now, while the pages come, or an L1 of which this engine has pinned nearly
            all could not take them."""
            keys, book, places = self.tree_cache.keys_of(req), current().book, list(missing)
            loader = current().loader
            assert loader is not None

            def wanted() -> bool:
                return req.rid in self.outlet.requests

            def pin(count: int) -> None:
                if wanted():
                    self.tree_cache.lookahead.forget()
                    book.match(keys[: places[count - 1] + 1])

            loader.order(req, [keys[at] for at in places], pin, wanted)
            node = book.match(keys[: min(missing)])
            self.outlet.courses[req.rid].loads.append(node.depth)
            book.make_room(max(missing) + 1 - node.depth, node)

        def _load_again(self, req: Any) -> bool:
            """Pin what was brought. Whether the request waits once more, for pages that went while others came."""
            tiered, course = self._tiered(), self.outlet.courses[req.rid]
            assert tiered is not None
            keys = self.tree_cache.keys_of(req)[: 1 + max(at for places in course.lower for at in places)]
            depth = current().book.match(keys).depth
            self.outlet.timelines.mark(req.rid, "pinned")
            again = course.loads[-1] < depth < len(keys) and len(course.loads) < LOADS
            missing = lower(tiered.tiers(keys)()) if again else {}
            if missing:
                self._load(req, missing)
            return bool(missing)

        def _loaded(self) -> None:
            """Requests whose pages have come join the queue."""
            loader = current().loader
            if loader is None:
                return
            ready = loader.ready()
            if ready:
                self.tree_cache.lookahead.forget()
            for request, whole in ready:
                if request.rid in self.outlet.requests:  # else it was cancelled meanwhile
                    self.outlet.timelines.mark(request.rid, "fetched")
                    if not (whole and self._load_again(request)):
                        self._enqueue(request)

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
                "leases_forced": book.source.forced,
                "loading": takeover.loader.waiting if takeover.loader is not None else 0,
                "loaded_pages": takeover.loader.loaded_pages if takeover.loader is not None else 0,
                "sessions": len(takeover.keeper) if takeover.keeper is not None else 0,
                "weights_mapped": int(takeover.weights is not None and not takeover.weights.loaded_here),
                **current().counters,
            }

    return EngineScheduler
