"""Results of SGLang's scheduler as messages of `wire.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from omni_flow.compute.errors import BadRequest, ComputeError, EngineFull, ForwardFailed
from omni_flow.compute.prefix import PageChain, marks
from omni_flow.compute.sglang.takeover import current
from omni_flow.compute.sglang.timeline import Mark, Timelines
from omni_flow.compute.sglang.wire import End, FromEngine, Generate, Inlet, Refused, Step


@dataclass(slots=True)
class Course:
    """What is noted of a request under way.

    Args:
        chain: of its pages.
        lower: places of the pages of its prompt that were in no higher tier than L2, or than L3, when it came.
        loads: how many pages from the first on were pinned each time that others were ordered.
        timeline: until its first token, if asked for.
    """

    chain: PageChain
    lower: tuple[list[int], list[int]] = ([], [])
    loads: list[int] = field(default_factory=list)
    timeline: list[Mark] = field(default_factory=list)

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
        self.timelines = Timelines()
        self._prompt: dict[str, list[float]] = {}

    def send_output(self, output: Any, _cause: Any = None) -> None:
        kind = type(output).__name__
        if kind == "AbortReq":
            self._aborted(output.rid, output.finished_reason or {"message": output.abort_message or "aborted"})
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
        self.timelines.end(rid)
        self._prompt.pop(rid, None)
        return self.requests.pop(rid, None)

    def end_session(self, session: str) -> None:
        """A session is over: those of its requests that still run keep nothing for it."""
        for asked in self.requests.values():
            if asked.session == session:
                asked.session = ""

    def refuse(self, rid: str, error: ComputeError) -> None:
        """A request ends with this error."""
        asked = self.forget(rid)
        if asked is not None:
            self._inlet.send(Refused.of(asked.number, error))

    def _aborted(self, rid: str, reason: dict[str, Any]) -> None:
        """SGLang ended a request for this reason, or a step hook did."""
        message = str(reason.get("message") or reason)
        if reason.get("err_type") == ForwardFailed.__name__:
            self.refuse(rid, ForwardFailed(message))
        elif (reason.get("status_code") or 0) >= HTTPStatus.INTERNAL_SERVER_ERROR:  # no room: not the request's fault
            self.refuse(rid, EngineFull(message))
        else:
            self.refuse(rid, BadRequest(message))

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
            self._aborted(rid, reason)
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
            if asked.timeline and not self.courses[rid].timeline:
                self.timelines.mark(rid, "answered")
                self.courses[rid].timeline = self.timelines.end(rid)
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
                    course.timeline,
                )
            )
