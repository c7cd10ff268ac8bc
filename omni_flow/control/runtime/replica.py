"""A replica: one instance of a role and the shares it hosts, on one node."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_flow.control.host import Activation
from omni_flow.control.plan import Interface, RolePlan
from omni_flow.control.runtime.closed import ClosedRequests
from omni_flow.control.runtime.execution import Execution, Running
from omni_flow.control.runtime.methods import Method
from omni_flow.control.runtime.party import Party
from omni_flow.control.runtime.wire import CLOSE, Envelope, Head, decode_head

if TYPE_CHECKING:
    from omni_flow.control.runtime.node import Node


class Replica:
    """One instance of a role. `id` names this incarnation (`tts/0@3`).

    `threads`: worker threads for plain methods; more than one only if the role's methods may run side by side (a class
    says so with `max_threads`). `grace_s`: how long a thread may outlive its request before the replica must be
    restarted; `on_stuck` is told then.
    """

    def __init__(
        self,
        node: Node,
        role: RolePlan,
        id: str,
        *,
        grace_s: float = 5.0,
        on_stuck: Callable[[str], None] | None = None,
        data: Any = None,
    ) -> None:
        self.node = node
        self.role = role
        self.id = id
        self.log = logging.getLogger(f"omni_flow.role.{role.spec.name}")
        self.data = data
        self.activations = 0
        self.facts_dropped = 0
        self.loops_stopped = 0
        self.grace_s = grace_s
        self.on_stuck = on_stuck
        self.parties: dict[bytes, Party] = {}
        self.instance: Any = None
        self._closed: dict[str, ClosedRequests] = {}
        factory = role.spec.factory
        self.execution = Execution(self, int(getattr(factory, "max_threads", 1)))

    async def load(self) -> None:
        """Construct the role and run its `setup` and `warm_up`, off the loop unless they are `async`.

        What has a parameter `data` gets the memory manager's client, as `ctx.data`; None if there is none.
        """
        spec = self.role.spec
        if spec.factory is None:
            raise LookupError(f"role {spec.name!r} has no class")
        factory = spec.factory
        self.instance = await asyncio.to_thread(lambda: factory(**spec.init))
        for name in ("setup", "warm_up"):
            await self._call_optional(name)
        plan, values = self.node.plan, self.node.values
        self.execution.methods = [Method(plan, i, self.instance, values) for i in self.role.members]
        self.node.replicas[self.role.id] = self

    async def _call_optional(self, name: str) -> None:
        method = getattr(self.instance, name, None)
        if method is None:
            return
        given = {"data": self.data} if "data" in inspect.signature(method).parameters else {}
        if inspect.iscoroutinefunction(method):
            await method(**given)
        else:
            await asyncio.to_thread(method, **given)

    # ---- messages -------------------------------------------------------------------------------------------

    def receive(self, envelope: Envelope) -> None:
        """Take what another node, or this one, sent to a share of this role."""
        party = self.parties.get(envelope.head)
        if envelope.role == CLOSE:
            self._close_request(party, envelope)
            return
        if party is None:
            party = self._admit(envelope)
            if party is None:
                return
        elif envelope.oldest > party.book.oldest:
            party.book.advance(envelope.oldest)
        share = party.shares.get(envelope.share)
        if share is None:
            share = party.share(envelope.share)
        for message in envelope.messages:
            share.receive(message)

    def _book(self, gateway: str) -> ClosedRequests:
        book = self._closed.get(gateway)
        if book is None:
            book = self._closed[gateway] = ClosedRequests()
        return book

    def _admit(self, envelope: Envelope) -> Party | None:
        """The party of a request seen for the first time; None if it is closed already."""
        gateway = self.node.gateway
        here = None if gateway is None else gateway.live.get(envelope.head)
        info = decode_head(envelope.head) if here is None else here.info
        book = self._book(info.gateway)
        book.advance(envelope.oldest)
        if book.is_closed(info.number) or info.gateway in self.node.roster.gateways_gone:
            return None
        if not self._is_for_me(info.replicas[self.role.id]):
            self.log.warning("%s refuses a message of request %s/%d, which is for %s",
                             self.id, info.gateway, info.number, info.replicas[self.role.id])  # fmt: skip
            return None
        party = self.parties[envelope.head] = Party(self, envelope.head, info, book)
        return party

    def _is_for_me(self, replicas: Sequence[str]) -> bool:
        """Whether a request whose replicas of this role are `replicas` may come here: pinned, or an earlier incarnation
        of this place was. The sender knows the roster; this node may not have heard of itself as a successor yet.
        """
        if self.id in replicas:
            return True
        place = self.id.rpartition("@")[0] + "@"
        return any(replica.startswith(place) for replica in replicas)

    def _close_request(self, party: Party | None, envelope: Envelope) -> None:
        info: Head = party.info if party is not None else decode_head(envelope.head)
        book = self._book(info.gateway)
        book.close(info.number)
        book.advance(envelope.oldest)
        if party is not None:
            self._forget(party)

    def _forget(self, party: Party) -> None:
        del self.parties[party.head]
        party.over = True
        party.out = {}
        for share in party.shares.values():
            self.facts_dropped += share.dropped
            self.loops_stopped += share.stopped_by_max_iters
            for activation in share.close():
                running = self.execution.cancel(activation)
                if not running.method.asynchronous:
                    self.node.loop.call_later(self.grace_s, self._check_stuck, running)
        party.shares = {}
        self.node.settle(party)
        if self.node.retiring and not self.parties:
            self.node.retired()

    def _check_stuck(self, running: Running) -> None:
        """Grace is over: a thread that still runs role code for closed requests alone makes this replica useless."""
        wanted = any(not one.activation.closed for one in running.beside)
        if running.in_thread and not wanted and self.on_stuck is not None:
            self.on_stuck(
                f"{running.method.interface.name} runs on in its thread {self.grace_s:g} s after its request was closed"
            )

    def gateway_gone(self, gateway: str) -> None:
        """A gateway died: its requests are over."""
        for party in [p for p in self.parties.values() if p.info.gateway == gateway]:
            self._forget(party)
        self._closed.pop(gateway, None)

    # ---- state ----------------------------------------------------------------------------------------------

    def iteration(self, interface: Interface, activation: Activation) -> tuple[int, bool]:
        """The number of the innermost loop iteration around an activation, and whether it is the last one allowed."""
        sources, plan = interface.scope, self.node.plan
        for depth in range(len(sources) - 1, -1, -1):
            source = plan.sources[sources[depth]]
            if source.kind == "loop":
                number = activation.path[depth]
                return number, number + 1 == plan.interfaces[source.creator].max_iters
        return 0, False

    def census(self) -> dict[str, int]:
        """What is held: requests, open nodes, running activations."""
        found = {"requests": len(self.parties), "nodes": 0, "running": 0, "open_numbers": 0}
        for party in self.parties.values():
            for share in party.shares.values():
                for name, number in share.census().items():
                    if name in found:
                        found[name] += number
        return found

    def counters(self) -> Mapping[str, int]:
        """Since the role was made: messages that came again or for what was done (`facts_dropped`) and loops ended by
        `max_iters` (`loops_stopped`), both of requests that are over, and what the role itself counts, if it has a
        method `counters`; called on the loop.
        """
        own = {"facts_dropped": self.facts_dropped, "loops_stopped": self.loops_stopped}
        count = getattr(self.instance, "counters", None)
        if count is None:
            return own
        try:
            return own | {name: int(number) for name, number in count().items()}
        except Exception:
            self.log.exception("counters raised, or gave what is no number")
            return own

    @property
    def may_ail(self) -> bool:
        """Whether the role has a method `ails`."""
        return hasattr(self.instance, "ails")

    def ails(self) -> str:
        """Why the role can't serve for now, if its method `ails` says so; called on the loop. Empty: it can."""
        try:
            return str(getattr(self.instance, "ails", str)())
        except Exception as error:
            self.log.exception("ails raised")
            return f"ails raised {type(error).__name__}: {error}"

    async def close(self) -> None:
        """Close every request and the role itself."""
        for party in list(self.parties.values()):
            self._forget(party)
        self.execution.close()
        self.node.replicas.pop(self.role.id, None)
        if self.instance is not None:
            await self._call_optional("close")
