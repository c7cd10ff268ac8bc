"""The gateway: admits requests, pins their shares, owns their outcome and their streamed placeholders.

It lives in the process of whoever calls (the Python client, the HTTP server) and needs no other service: it knows who
lives from the roster and how busy replicas are from its own live requests.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from omni_flow.control.codec import NotSerialisable, mismatch
from omni_flow.control.runtime.balance import CacheAware, balancer_of
from omni_flow.control.runtime.closed import ClosedRequests
from omni_flow.control.runtime.errors import InvalidInput, NoReplica, Overloaded, UnknownParameter
from omni_flow.control.runtime.live_request import LiveRequest
from omni_flow.control.runtime.prefixes import Holders, Key, Prefix, pieces_of
from omni_flow.control.runtime.values import WrongValue, may_spill, read_as
from omni_flow.control.runtime.wire import CLOSE, EndSession, Envelope, Head, encode_head
from omni_flow.control.types import Type, describe
from omni_flow.refs import ABSENT

if TYPE_CHECKING:
    from omni_flow.control.runtime.node import Node

MOST_LINEAGES: Final = 100_000
"""Sessions of which a gateway knows how far roles have come with them; the least recently used is forgotten first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Admission limits of a gateway. `max_requests`: live requests; `max_per_session`: those of one session."""

    max_requests: int = 4096
    max_per_session: int | None = None


class Gateway:
    """Admits requests of one graph on one node.

    `holders`: makes what the `cache_aware` strategy goes by, of its `room`; without it, what was sent where.
    """

    def __init__(
        self,
        node: Node,
        *,
        limits: Limits | None = None,
        id: str | None = None,
        holders: Callable[[int], Holders] | None = None,
    ) -> None:
        self.node = node
        self.id = id or f"gw-{os.getpid()}-{secrets.token_hex(4)}"
        self.limits = limits or Limits()
        self.live: dict[bytes, LiveRequest] = {}
        self.book = ClosedRequests()
        self.load: dict[str, int] = {}
        self.sessions: dict[str, int] = {}
        self._ending: dict[str, set[str]] = {}
        self._lineages: OrderedDict[tuple[str, str], dict[int, int]] = OrderedDict()
        self._numbers = itertools.count()
        self._open_numbers: dict[int, None] = {}
        self._balancers = [balancer_of(role.spec, holders) for role in node.plan.roles]
        self._lists: list[list[str]] | None = None
        self.on_finished: Callable[[Head], None] = lambda head: None
        spec = node.plan.spec
        self._types = {p.name: p.type if isinstance(p.type, Type) else None for p in spec.placeholders}
        self._read_as = {n: () if self._types[n] in kinds else kinds for n, kinds in read_as(node.plan).items()}
        self._spills = {p.name: may_spill(node.plan, p.name) for p in spec.placeholders}
        self.streamed = {p.name for p in spec.placeholders if p.stream}
        self._required = [p.name for p in spec.placeholders if p.required]
        self._defaults = {p.name: p.default for p in spec.params}
        self._param_types = {p.name: p.type if isinstance(p.type, Type) else None for p in spec.params}
        node.gateway = self

    # ---- admission ------------------------------------------------------------------------------------------

    def submit(
        self,
        inputs: Mapping[str, Any],
        *,
        params: Mapping[str, Any] | None = None,
        session: str | None = None,
        deadline_s: float | None = None,
        seed: int | None = None,
        timeline: bool = False,
        trace: str | None = None,
        tenant: str = "",
        outputs: Collection[str] | None = None,
    ) -> LiveRequest:
        """Admit a request. Its streamed placeholders are fed through the request afterwards.

        `outputs`: those that are wanted; the request is over when they are decided. `tenant`: see `Context`.

        Raises:
            InvalidInput: an unknown placeholder, a missing required one, or a value of the wrong type; an unknown
                output, or none; a seed or deadline that is no number.
            UnknownParameter: a param that the graph does not declare.
            Overloaded: the gateway's limits are reached.
            NoReplica: a role has no live replica.
        """
        self._check_limits(session)
        _check_numbers(deadline_s, seed)
        if outputs is not None:
            self._check_outputs(outputs)
        snapshot = self._snapshot(params)
        payloads = self._encode_inputs(inputs)
        replicas, keys = self._place(session, lambda: pieces_of(inputs, tenant))
        head = Head(
            graph=self.node.plan.spec.name,
            gateway=self.id,
            number=next(self._numbers),
            address=self.node.address,
            replicas=replicas,
            params=snapshot,
            seed=secrets.randbits(63) if seed is None else seed,
            session=session,
            deadline_s=deadline_s,
            trace=trace,
            timeline=timeline,
            tenant=tenant,
            lineage={} if session is None else self._lineages.get((session, tenant), {}),
        )
        try:
            data = encode_head(head)
        except (OverflowError, TypeError, ValueError) as error:  # only params can hold such a value
            raise InvalidInput("params", str(error)) from error
        request = LiveRequest(self, data, head, outputs, keys)
        self._count(head, 1)
        self.live[request.head] = request
        self._open_numbers[head.number] = None
        request.begin(payloads)
        self.node.schedule_flush()
        return request

    def _check_limits(self, session: str | None) -> None:
        limits = self.limits
        if len(self.live) >= limits.max_requests:
            raise Overloaded(f"{len(self.live)} requests are live, the limit is {limits.max_requests}")
        if session is not None and limits.max_per_session is not None:
            live = self.sessions.get(session, 0)
            if live >= limits.max_per_session:
                raise Overloaded(f"session {session!r} has {live} live requests, the limit is {limits.max_per_session}")

    def _check_outputs(self, outputs: Collection[str]) -> None:
        known = [o.name for o in self.node.plan.outputs if not o.hidden]
        for name in outputs:
            if name not in known:
                raise InvalidInput(name, f"the graph has no such output; it has {', '.join(known) or 'none'}")
        if not outputs:
            raise InvalidInput("outputs", f"name at least one of {', '.join(known) or 'none'}")

    def _encode_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        payloads = {}
        for name, value in inputs.items():
            if name not in self._types:
                raise InvalidInput(
                    name, f"the graph has no such placeholder; it has {', '.join(self._types) or 'none'}"
                )
            if name in self.streamed:
                raise InvalidInput(name, "it is streamed: send its frames to the request")
            if value is not ABSENT:
                payloads[name] = self.encode_input(name, value)[0]
        for name in self._required:
            if name not in payloads and name not in self.streamed:
                raise InvalidInput(name, "it is required and was not sent")
        return payloads

    def encode_input(self, name: str, value: Any) -> tuple[Any, int]:
        """The payload of a placeholder's value. Raises InvalidInput, also if no reader of it takes such a value."""
        type_, wrong = self._types[name], [mismatch(kind, value) for kind in self._read_as[name]]
        if wrong and None not in wrong and (type_ is None or type_.accepts(value)):
            raise InvalidInput(name, "; ".join(why for why in wrong if why is not None))
        try:
            values, spill = self.node.values, self._spills[name]
            return values.encode(value, type_, self.node.plan.spec.name, name, spill)
        except WrongValue as wrong:
            raise InvalidInput(name, wrong.mismatch) from wrong
        except NotSerialisable as wrong:
            raise InvalidInput(name, str(wrong)) from wrong

    def _snapshot(self, params: Mapping[str, Any] | None) -> dict[str, Any]:
        if not params:
            return self._defaults
        for name, value in params.items():
            if name not in self._defaults:
                raise UnknownParameter(name, sorted(self._defaults))
            type_ = self._param_types[name]
            if type_ is not None and (mismatch := type_.mismatch(value)) is not None:
                raise InvalidInput(name, mismatch)
        return {**self._defaults, **params}

    def _place(self, session: str | None, keys_of: Callable[[], list[Key]]) -> tuple[list[list[str]], Sequence[Key]]:
        """The pinned replicas of each role, and the pieces of the inputs if any strategy looked at them."""
        keys: list[Key] | None = None
        if self._lists is None:
            self._lists = [[r.id for r in self.node.roster.of_role(role.spec.name)] for role in self.node.plan.roles]
        placed = []
        for role, replicas, balancer in zip(self.node.plan.roles, self._lists, self._balancers, strict=True):
            if len(replicas) == 1:
                placed.append(replicas)
                continue
            if not replicas:
                raise NoReplica(role.spec.name)
            if balancer.wants_keys and keys is None:
                keys = keys_of()
            order = balancer.order(replicas, self.load, session, keys or ())
            placed.append(order[:1] if role.spec.stateful else order)
        return placed, keys or ()

    def learned(self, keys: Sequence[Key], role: int, prefix: Prefix) -> None:
        """A role says which KV the inputs of a request became."""
        balancer = self._balancers[role]
        if keys and isinstance(balancer, CacheAware):
            balancer.holders.learned(keys, prefix)

    def advanced(self, head: Head, role: int, lineage: int) -> None:
        """A role says how far it has come with the session of a request."""
        if head.session is None:
            return
        name = (head.session, head.tenant)
        self._lineages[name] = {**self._lineages.get(name, {}), role: lineage}
        self._lineages.move_to_end(name)
        if len(self._lineages) > MOST_LINEAGES:
            self._lineages.popitem(last=False)

    def _count(self, head: Head, step: int) -> None:
        for hosts in head.replicas:
            self.load[hosts[0]] = self.load.get(hosts[0], 0) + step
        if head.session is not None:
            live = self.sessions.get(head.session, 0) + step
            if live:
                self.sessions[head.session] = live
            else:
                self.sessions.pop(head.session, None)

    # ---- messages -------------------------------------------------------------------------------------------

    def receive(self, envelope: Envelope) -> None:
        """Take what shares say to this gateway."""
        request = self.live.get(envelope.head)
        if request is not None:
            for message in envelope.messages:
                request.receive(message)

    def roster_changed(self) -> None:
        """Who lives has changed: place new requests anew, answer deaths."""
        self._lists = None
        for dead in self.node.roster.dead:
            self.load.pop(dead, None)
        for request in list(self.live.values()):
            request.roster_changed()

    def finished(self, request: LiveRequest) -> None:
        """A request has its outcome: forget it, here and everywhere."""
        head = request.info
        del self.live[request.head]
        del self._open_numbers[head.number]
        self.book.oldest = next(iter(self._open_numbers), head.number + 1)
        self._count(head, -1)
        envelope = Envelope(request.head, self.book.oldest, CLOSE, 0, [])
        roster = self.node.roster
        for address in {roster.address(replica) for hosts in head.replicas for replica in hosts} | {
            roster.address(new) for new in request.successors()
        }:
            if address is not None:
                self.node.post(address, envelope)
        if head.session in self._ending and head.session not in self.sessions:
            for tenant in self._ending.pop(head.session):
                self._say_ended(head.session, tenant)
        self.on_finished(head)

    def end_session(self, session: str, tenant: str = "") -> None:
        """Tell every replica that a session is over. Its requests under way go on.

        When the last of those is over the replicas are told again: it may have begun, somewhere, after the first time.
        """
        self._say_ended(session, tenant)
        if session in self.sessions:
            self._ending.setdefault(session, set()).add(tenant)

    def _say_ended(self, session: str, tenant: str) -> None:
        self._lineages.pop((session, tenant), None)
        for address in {record.address for record in self.node.roster.live.values()}:
            self.node.post(address, EndSession(session, tenant))

    async def close(self) -> None:
        """Cancel what is live and tell everyone."""
        for request in list(self.live.values()):
            request.cancel()
        self.node.flush()


def _check_numbers(deadline_s: object, seed: object) -> None:
    if deadline_s is not None and not (isinstance(deadline_s, (int, float)) and deadline_s == deadline_s):
        raise InvalidInput("deadline", f"expected seconds, got {describe(deadline_s)}")
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**64):
        raise InvalidInput("seed", f"expected an int of 64 bits, got {describe(seed)}")
