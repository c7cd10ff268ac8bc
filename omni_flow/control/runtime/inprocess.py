"""A whole deployment on one event loop.

The first replica of every role and the gateway share one node, which hands them their messages without a transport;
the second replicas share another one, and so on, joined by in-process queues. For tests, notebooks and small graphs.
Values are passed, not copied; a dead process takes everything with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.runtime.gateway import Gateway, Limits
from omni_flow.control.runtime.node import Node
from omni_flow.control.runtime.prefixes import Holders
from omni_flow.control.runtime.replica import Replica
from omni_flow.control.runtime.values import Values
from omni_flow.control.runtime.wire import BatchCodec, Record, Roster
from omni_flow.control.transport import InprocHub, make_transport


class InProcess:
    """All replicas of a graph and a gateway, on the running loop. `await start()`, then `gateway`; `await close()`."""

    def __init__(
        self,
        graph: CompiledGraph,
        *,
        replicas: Mapping[str, int] | None = None,
        credit: int | None = None,
        limits: Limits | None = None,
        holders: Callable[[int], Holders] | None = None,
    ) -> None:
        self._graph = graph
        self._replicas = dict(replicas or {})
        self._credit = credit
        self._hub = InprocHub()
        self._values = Values(local=True)
        self.replicas: list[Replica] = []
        self._nodes = [self._node("0")]
        self.node = self._nodes[0]
        self.gateway = Gateway(self.node, limits=limits, holders=holders)

    def _node(self, name: str) -> Node:
        transport = make_transport(f"inproc://{name}", BatchCodec(), hub=self._hub)
        return Node(self._graph.plan, transport, self._values, credit=self._credit)

    async def start(self) -> None:
        """Load every role. Raises whatever a role's construction raises, after closing the others."""
        records = []
        await self.node.start()
        try:
            for role in self._graph.plan.roles:
                for k in range(self._replicas.get(role.spec.name, role.spec.replicas)):
                    if k == len(self._nodes):
                        self._nodes.append(self._node(str(k)))
                        await self._nodes[k].start()
                    id = f"{role.spec.name}/{k}@0"
                    replica = Replica(self._nodes[k], role, id)
                    self.replicas.append(replica)
                    await replica.load()
                    records.append(Record(id, role.spec.name, replica.node.address, socket.gethostname(), os.getpid()))
        except BaseException:
            await self.close()
            raise
        roster = Roster(0, records, {}, {}, [], [])
        for node in self._nodes:
            node.apply(roster)

    def census(self) -> dict[str, int]:
        """What all replicas hold, summed, and the live requests of the gateway."""
        total = {"live": len(self.gateway.live)}
        for replica in self.replicas:
            for name, number in replica.census().items():
                total[name] = total.get(name, 0) + number
        return total

    async def close(self) -> None:
        """Cancel what is live and close every role."""
        await self.gateway.close()
        for replica in self.replicas:
            await replica.close()
        for node in self._nodes:
            await node.close()
