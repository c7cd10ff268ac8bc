"""The local launchers: a whole deployment on this machine, without any service.

`LocalLauncher`: every replica is a process; the gateway and the registry live in the caller's. `LoopLauncher`: all of
it runs on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, Unpack, get_args

import msgspec

from omni_flow.control.compile import DONE
from omni_flow.control.compiled import CompiledGraph
from omni_flow.control.graph import Graph
from omni_flow.control.runtime.gateway import Gateway, Limits
from omni_flow.control.runtime.inprocess import InProcess
from omni_flow.control.runtime.node import Node
from omni_flow.control.runtime.values import Values
from omni_flow.control.runtime.wire import BatchCodec, Head
from omni_flow.control.transport import make_transport
from omni_flow.control.types import KV, Bytes, Scalar, Text, Tokens
from omni_flow.data.errors import DataError
from omni_flow.data.ssd.errors import BadSsdConfig
from omni_flow.deploy.blame import blame
from omni_flow.deploy.errors import LaunchError, UnknownRole
from omni_flow.deploy.holders import ManagerHolders
from omni_flow.deploy.link import NurseryLink
from omni_flow.deploy.memory import Memory, MemoryProcess
from omni_flow.deploy.messages import Setup
from omni_flow.deploy.places import BACKOFF_S, STARTING, UP, PlaceStatus, RoleStatus, role_state
from omni_flow.deploy.pools import kv_pools, merged
from omni_flow.deploy.rundir import RunDir
from omni_flow.deploy.supervisor import Supervisor
from omni_flow.deploy.tensors import ArenaTensors

Transports = Literal["unix", "ipc", "tcp", "inproc"]
Starts = Literal["auto", "fork", "spawn"]

log = logging.getLogger("omni_flow.deploy")

CLOSE_GRACE_S = 3.0
"""What workers get to end by themselves when a deployment closes."""


class Launcher(Protocol):
    """What both kinds of deployment offer, on their loop."""

    gateway: Gateway

    async def start(self) -> None:
        """Bring every role up. Raises LaunchError; nothing is left then."""

    def status(self) -> dict[str, RoleStatus]:
        """Every role with its places."""

    async def scale(self, role: str, count: int, drain_s: float) -> None:
        """Have `count` replicas of a role."""

    async def census(self) -> dict[str, dict[str, int]]:
        """What every live replica holds, by id."""

    async def counters(self) -> dict[str, dict[str, int]]:
        """What the role of every live replica has counted, by the replica's id."""

    async def close(self, drain_s: float) -> None:
        """Wait `drain_s` at most for live requests, cancel the others, end everything."""


def counts_of(graph: CompiledGraph, replicas: Mapping[str, int] | None) -> dict[str, int]:
    """How many replicas each role gets: as asked, else as declared. Raises UnknownRole, ValueError."""
    counts = {name: role.replicas for name, role in graph.roles.items()}
    for role, count in (replicas or {}).items():
        if role not in counts:
            raise UnknownRole(role, list(counts))
        if count < 1:
            raise ValueError(f"role {role!r} needs at least one replica, not {count}")
        counts[role] = count
    return counts


def check_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError for an option that `launch` does not take, ValueError for an unknown transport or start."""
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"launch takes no option {name!r}; it takes {', '.join(Options.__annotations__)}")
    for name, known in (("transport", get_args(Transports)), ("start", get_args(Starts))):
        if options.get(name, known[0]) not in known:
            raise ValueError(f"{name}={options[name]!r} is not one of {', '.join(known)}")


def _target_for(start: Starts, target: str | None) -> str | None:
    """What a fresh interpreter is to import; None: fork. Raises LaunchError."""
    if start == "spawn" and target is None:
        raise LaunchError({"": "start='spawn' needs a target that a fresh process can import: target='file.py:graph'"})
    return None if start == "fork" else target


def may_carry_array(type_: Any) -> bool:
    """Whether values of a field's type may be or hold arrays; of an undeclared type, anything may."""
    return not isinstance(type_, (Text, Bytes, Scalar, Tokens, KV))


async def drained(gateway: Gateway, drain_s: float) -> None:
    """Wait until no request is live, for `drain_s` at most."""
    if not gateway.live or drain_s <= 0:
        return
    empty: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    before = gateway.on_finished

    def finished(head: Head) -> None:
        before(head)
        if not gateway.live and not empty.done():
            empty.set_result(None)

    gateway.on_finished = finished
    try:
        await asyncio.wait_for(empty, drain_s)
    except TimeoutError:
        log.warning("%d requests are cancelled, for they did not end within %g s", len(gateway.live), drain_s)
    finally:
        gateway.on_finished = before


class Options(TypedDict, total=False):
    """What `launch` takes. In one process only the first three matter.

    `replicas`: how many of a role, where that is not as declared. `credit`: how many numbers of a stream its creator
    may have open. `limits`: admission limits of the gateway. `transport`: `unix` (default), `ipc` or `tcp` (loopback,
    encrypted); `inproc` is the same as `processes=False`. `run_dir`: where the sockets lie, a directory of this user
    alone; a fresh one unless given. `target`: names the graph to a fresh interpreter: `file.py:attr`, a folder with
    graph.py, or `module:attr`. `start`: `fork`: workers are forked from this process, which has the graph; `spawn`:
    from a fresh interpreter that imports `target`, needed where this process uses CUDA; `auto`: spawn if there is a
    target. `on_event`: called on the loop with a line for each thing that happens to a replica. `grace_s`: how long a
    worker thread may outlive its request, `stall_s`: how long role code may keep an event loop from turning, before
    its replica is started anew. `backoff_s`: waits before the restarts of a replica that dies again and again; after
    one more its place is down. `log_level`: of the workers, whose logs go to standard error. `debug`: tracebacks in
    LaunchError. `memory`: the arena through which roles hand over large arrays, and KV pools beside those that role
    classes ask for (`kv_pools`); None: arrays travel in messages, engines keep their pages to themselves.
    """

    replicas: Mapping[str, int] | None
    credit: int | None
    limits: Limits | None
    transport: Transports
    run_dir: str | None
    start: Starts
    target: str | None
    on_event: Callable[[str], None] | None
    grace_s: float
    stall_s: float
    backoff_s: Sequence[float]
    log_level: str
    debug: bool
    memory: Memory | None


class LocalLauncher:
    """Replicas as processes of this machine. Made by any thread, best the main one; started on a loop."""

    def __init__(self, graph: Graph | CompiledGraph, **options: Unpack[Options]) -> None:
        """Start the nursery, but no replica yet. Raises GraphError, LaunchError, UnknownRole."""
        check_options(options)
        compiled = graph.compile() if isinstance(graph, Graph) else graph
        self._plan = compiled.plan
        self._counts = counts_of(compiled, options.get("replicas"))
        memory = options.get("memory", Memory())
        pools = () if memory is None else merged(memory.pools, kv_pools(self._plan, self._each(memory.managers)))
        self._pools = bool(pools)
        self._options = options
        self._credit = options.get("credit")
        self._transport = options.get("transport", "unix")
        self._key = secrets.token_hex(32) if self._transport == "tcp" else None
        self._target = _target_for(options.get("start", "auto"), options.get("target"))
        self._numbers = itertools.count()
        self._run_dir = RunDir(options.get("run_dir"))
        self._notify = options.get("on_event") or (lambda line: log.info("%s", line))
        self._holders: list[ManagerHolders] = []
        self._tensors: ArenaTensors | None = None
        try:
            self.memories = [] if memory is None else self._make_memories(msgspec.structs.replace(memory, pools=pools))
            self.memory = self.memories[0] if self.memories else None
            link = self._make_link()
        except BaseException:
            self._run_dir.remove()
            raise
        self._supervisor = Supervisor(
            self._plan,
            link,
            self._make_link,
            self._new_address,
            self._notify,
            backoff_s=options.get("backoff_s", BACKOFF_S),
            debug=options.get("debug", False),
        )
        self.gateway: Gateway
        self.node: Node | None = None

    def _field_types(self) -> Iterator[Any]:
        """The declared type of everything that travels."""
        yield from (p.type for p in self._plan.spec.placeholders)
        yield from (o.type for i in self._plan.spec.interfaces for o in i.outputs if o.name != DONE)

    def _make_memories(self, memory: Memory) -> list[MemoryProcess]:
        """The managers that the deployment needs. Raises LaunchError: their SSD tier can't be."""
        if not (memory.pools or memory.ssd or any(may_carry_array(f) for f in self._field_types())):
            return []
        base, graph = self._run_dir.path, self._plan.spec.name
        try:
            return [
                MemoryProcess(
                    memory.config(f"{base}/memory{number or ''}.sock", graph, number),
                    self._notify,
                    memory.disk(graph, number),
                )
                for number in range(memory.managers if memory.pools else 1)
            ]
        except BadSsdConfig as error:
            raise LaunchError({"": f"the SSD tier of graph {graph!r} can't be: {error}"}) from error

    def _each(self, managers: int) -> dict[str, int]:
        """How many replicas of each role one manager serves at most."""
        return {role: -(-count // managers) for role, count in self._counts.items()}

    def _make_holders(self, room: int) -> ManagerHolders:
        made = ManagerHolders([memory.address for memory in self.memories], room)
        self._holders.append(made)
        return made

    def _make_link(self) -> NurseryLink:
        return NurseryLink(self._plan, self._run_dir.lock, self._target)

    def _new_address(self) -> str:
        if self._transport == "tcp":
            return "tcp://127.0.0.1:0"
        return f"{self._transport}://{self._run_dir.path}/{next(self._numbers)}.sock"

    async def start(self) -> None:
        """Bring every role up, on the running loop. Raises LaunchError; nothing is left then."""
        try:
            if self.memory is not None:
                self._tensors = ArenaTensors(self.memory.address, "gateway")
                starting = asyncio.ensure_future(asyncio.gather(*(memory.start() for memory in self.memories)))
                if self._pools:  # roles connect to their pool while they load
                    await starting
                try:
                    await self._start_node()
                finally:
                    await starting
            else:
                await self._start_node()
        except DataError as error:
            await self._end()
            raise LaunchError({"": f"the memory manager did not start: {error}"}) from error
        except BaseException:
            await self._end()
            raise

    async def _start_node(self) -> None:
        membership = self._supervisor.membership
        self.node = Node(
            self._plan,
            make_transport(self._new_address(), BatchCodec(self._tensors), key=self._key),
            Values(tensors=self._tensors),
            credit=self._credit,
            on_control=membership.on_control,
        )
        await self.node.start()
        membership.start(self.node)
        holders = self._make_holders if self._pools else None
        self.gateway = Gateway(self.node, limits=self._options.get("limits"), holders=holders)
        setup = Setup(
            registry=self.node.address,
            run_dir=self._run_dir.path,
            credit=self._credit,
            grace_s=self._options.get("grace_s", 5.0),
            stall_s=self._options.get("stall_s", 30.0),
            log_level=self._options.get("log_level", "INFO"),
            key=self._key,
            memory=tuple(memory.address for memory in self.memories),
        )
        self._supervisor.attach(setup, self.gateway)
        await self._supervisor.launch(self._counts)

    def status(self) -> dict[str, RoleStatus]:
        """Every role with its places."""
        return self._supervisor.status()

    async def scale(self, role: str, count: int, drain_s: float = 30.0) -> None:
        """Have `count` replicas of a role; those that leave finish their requests, for `drain_s` at most.

        Raises: UnknownRole, LaunchError, ValueError.
        """
        await self._supervisor.scale(role, count, drain_s)

    async def census(self) -> dict[str, dict[str, int]]:
        """What every live replica holds, by id."""
        assert self.node is not None
        return await self.node.inspect()

    async def counters(self) -> dict[str, dict[str, int]]:
        """What the role of every live replica has counted, by the replica's id."""
        assert self.node is not None
        return await self.node.counters()

    async def close(self, drain_s: float = 0.0) -> None:
        """Wait `drain_s` at most for live requests, cancel the others, end every process."""
        await drained(self.gateway, drain_s)
        await self.gateway.close()
        await self._end()

    async def _end(self) -> None:
        await self._supervisor.close(CLOSE_GRACE_S)
        if self.node is not None:
            await self.node.close()
        if self._tensors is not None:
            self._tensors.close()
        for holders in self._holders:
            await holders.close()
        await asyncio.gather(*(memory.close() for memory in self.memories))
        self._run_dir.remove()


class LoopLauncher:
    """Replicas on the caller's loop: the same face as `LocalLauncher`, in one process."""

    def __init__(self, graph: Graph | CompiledGraph, **options: Unpack[Options]) -> None:
        """Raises GraphError, UnknownRole."""
        check_options(options)
        compiled = graph.compile() if isinstance(graph, Graph) else graph
        counts = counts_of(compiled, options.get("replicas"))
        self._app = InProcess(compiled, replicas=counts, credit=options.get("credit"), limits=options.get("limits"))
        self._roles = list(compiled.roles)
        self.gateway = self._app.gateway

    async def start(self) -> None:
        """Load every role. Raises LaunchError."""
        try:
            await self._app.start()
        except Exception as error:
            loaded = [replica.role.spec.name for replica in self._app.replicas]
            raise LaunchError({loaded[-1] if loaded else "": str(blame(error))}) from error

    def status(self) -> dict[str, RoleStatus]:
        """Every role with its places, up unless they say that they can't serve for now."""
        places: dict[str, list[PlaceStatus]] = {role: [] for role in self._roles}
        for replica in self._app.replicas:
            place, cause = replica.id.rpartition("@")[0], replica.ails()
            state = STARTING if cause else UP
            places[replica.role.spec.name].append(PlaceStatus(place, state, os.getpid(), 0, 0, 0.0, cause))
        return {role: RoleStatus(role, role_state([p.state for p in those]), those) for role, those in places.items()}

    async def scale(self, role: str, count: int, drain_s: float) -> None:
        """Raises LaunchError: replicas of one process stay as many as they are."""
        raise LaunchError({role: "a deployment in one process cannot be scaled; launch it with processes=True"})

    async def census(self) -> dict[str, dict[str, int]]:
        """What every replica holds, by id."""
        return {replica.id: replica.census() for replica in self._app.replicas}

    async def counters(self) -> dict[str, dict[str, int]]:
        """What the role of every replica has counted, by the replica's id."""
        return {replica.id: dict(replica.counters()) for replica in self._app.replicas}

    async def close(self, drain_s: float) -> None:
        """Wait `drain_s` at most for live requests, cancel the others, close the roles."""
        await drained(self.gateway, drain_s)
        await self._app.close()
