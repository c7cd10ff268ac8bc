"""The other nodes as one node sees them: who lives, how to reach them, and the directory kept by their beats."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import numpy as np
import zmq.asyncio
from numpy.typing import NDArray

from omni_flow.data.errors import BadArgument, DataError, UnknownName
from omni_flow.data.identity import handshake_vector
from omni_flow.data.transfer import node_wire as w
from omni_flow.data.transfer.directory import U64, Directory, Holdings, Mask, merge
from omni_flow.data.transfer.errors import PeerRestarted, PeerUnreachable
from omni_flow.data.transfer.link import Handle, Link, Listener, Why
from omni_flow.data.transfer.node_config import NodeConfig

log = logging.getLogger("omni_flow.data.transfer")
MEET_S: Final = 2.0
MAX_NODES: Final = 1024
"""Addresses known at once."""
GONE_S: Final = 60.0
"""How long nobody was at an address that may be forgotten."""
Ended = Callable[[str, int | None], Awaitable[None]]


class Cluster:
    """Args: `ended`, told when a node is dead (None) or has begun a new life (its epoch); `handle`, for requests of
    other nodes that are not about membership or the directory."""

    def __init__(self, config: NodeConfig, pools: tuple[str, ...], ended: Ended, handle: Handle) -> None:
        self.config = config
        self.epoch = int.from_bytes(os.urandom(7), "little") | 1
        self.directory = Directory(config.silent_s)
        self.own = {name: Holdings() for name in pools}
        self._ended, self._handle = ended, handle
        self._changes: dict[str, list[tuple[U64, bool]]] = {name: [] for name in pools}
        self._sequence = 0
        self._context = zmq.asyncio.Context()
        self._links: dict[str, Link] = {}
        self._busy: set[str] = set()
        self._news = asyncio.Event()
        self._listener = Listener(self._context, config.listen, config.key, self._heard)
        for address in config.peers:
            self._know(address)

    @property
    def address(self) -> str:
        """Where other nodes reach this one."""
        address = self._listener.address
        if not self.config.advertise or not address.startswith("tcp://"):
            return address
        return f"tcp://{self.config.advertise}:{address.rsplit(':', 1)[1]}"

    async def link(self, name: str, timeout: float) -> Link:
        """The line to a living node in its present life, of which its beats may tell before the two have met.

        Raises: UnknownName; PeerUnreachable when they don't meet within `timeout` and `silent_s` seconds.
        """
        limit = min(max(timeout, 0.0), self.config.silent_s)
        try:
            async with asyncio.timeout(limit):
                while (link := self._line(name)) is None:
                    await self._news.wait()
                return link
        except TimeoutError as error:
            raise PeerUnreachable(f"node {name} lives, but was not met within {limit:.1f} s") from error

    def _line(self, name: str) -> Link | None:
        epoch = self.directory.epoch(name)
        if epoch is None:
            raise UnknownName(f"no living node {name!r}", f"there are {', '.join(self.directory.nodes()) or 'none'}")
        return next((link for link in self._links.values() if link.name == name and link.met == (name, epoch)), None)

    def changed(self, pool: str, numbers: U64, there: NDArray[np.bool_] | Mask) -> None:
        """What has come (`there`) and gone at this node, in order; told with the next beat."""
        edges = np.flatnonzero(np.diff(there.astype(np.int8))) + 1
        for part, present in zip(np.split(numbers, edges), np.split(there, edges), strict=True):
            if len(part):
                self._changes[pool].append((part, bool(present[0])))

    async def run(self) -> None:
        """Serve and beat until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listener.run())
            while True:
                await self._beat(group)
                await asyncio.sleep(self.config.beat_s)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._listener.close()
        self._context.destroy(linger=0)

    async def _beat(self, group: asyncio.TaskGroup) -> None:
        """Tell the others of this node, look for those not met, notice who is silent."""
        beat = self._next_beat()
        for link in list(self._links.values()):
            if link.name:
                await link.tell(beat)
            elif link.address not in self._busy:
                self._busy.add(link.address)
                group.create_task(self._meet(link))
        for name in self.directory.expire(time.monotonic()):
            log.warning("node is silent, its rows are dropped", extra={"node": name})
            silence = f"node {name} has said nothing for {self.config.silent_s} s"
            self._leave(name, None, partial(PeerUnreachable, silence))
            await self._ended(name, None)

    def _next_beat(self) -> w.Beat:
        changes: dict[str, tuple[bytes, bytes]] = {}
        for pool, series in self._changes.items():
            if series:
                added, removed = merge(series)
                series.clear()
                self.own[pool].apply(added, removed)
                changes[pool] = (added.tobytes(), removed.tobytes())
        self._sequence += bool(changes)
        return w.Beat(self.config.name, self.epoch, self._sequence, changes)

    def _know(self, address: str) -> None:
        """Open a line to a node. Raises: BadArgument for what is no address, or one too many."""
        if address in self._links:
            return
        full = len(self._links) >= MAX_NODES
        forgotten = self._longest_gone() if full else None
        if full and forgotten is None:
            raise BadArgument(f"{len(self._links)} addresses are known already, {address} is one too many")
        self._links[address] = Link(self._context, address, self.config.key)
        if forgotten is not None:
            log.info("address forgotten, nobody is there", extra={"address": forgotten.address})
            self._links.pop(forgotten.address).close()

    def _longest_gone(self) -> Link | None:
        """The address at which nobody has been for the longest, and for `GONE_S` at least: who has just come was not
        met yet. Never one of the configuration."""
        gone = asyncio.get_running_loop().time() - GONE_S
        links = [link for link in self._links.values() if link.met is None and link.since <= gone]
        others = [link for link in links if link.address not in self.config.peers]
        return min(others, key=lambda link: link.since, default=None)

    async def _meet(self, link: Link) -> None:
        """Say who one is; learn who the other is and whom it knows."""
        meet = w.Meet(w.PROTOCOL, self.config.name, self.epoch, self.address, handshake_vector())
        try:
            met = await link.ask(meet, w.Met, MEET_S)
        except DataError as error:
            log.debug("node not met", extra={"address": link.address, "error": str(error)})
            return
        finally:
            self._busy.discard(link.address)
        if self._links.get(link.address) is not link:  # it was forgotten meanwhile
            return
        if met.node == self.config.name:
            if met.epoch != self.epoch:
                log.error("another node has this node's name", extra={"node": met.node, "address": link.address})
            self._links.pop(link.address).close()
            return
        if self.directory.is_over(met.node, met.epoch):  # an answer that comes late
            return
        for other in self._links.values():
            if other.name == met.node:
                other.name = ""
        link.meet(met.node, met.epoch)
        for address in met.peers:
            if address != self.address:
                try:
                    self._know(address)
                except DataError as error:
                    log.warning("address not taken", extra={"node": met.node, "address": address, "error": str(error)})
        if await self._sign_of_life(met.node, met.epoch):
            await self._ask_rows(met.node)

    async def _sign_of_life(self, name: str, epoch: int) -> bool:
        """Whether it is that of a new life: then all that was of an earlier one has ended."""
        new = self.directory.heard(name, epoch, time.monotonic())
        if new:
            log.info("node met", extra={"node": name, "epoch": epoch})
            self._leave(name, epoch, partial(PeerRestarted, f"node {name} has begun a new life"))
            await self._ended(name, epoch)
        self._tell_waiting()
        return new

    async def _says_its_name(self, name: str, epoch: int, address: str) -> None:
        """A sign of life, too: else the silence of the life before would end what the new one asks."""
        link = self._links[address]
        link.since = asyncio.get_running_loop().time()
        if await self._sign_of_life(name, epoch) and link.met is None:
            # Our own first words there may have been lost with a life before.
            link.leave(partial(PeerRestarted, f"node {name} has begun a new life"))

    def _leave(self, name: str, epoch: int | None, why: Why) -> None:
        """The lines to a node are worth nothing any more, but for those to its life `epoch`."""
        for link in self._links.values():
            if link.met is not None and link.met[0] == name and link.met[1] != epoch:
                link.leave(why)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Whoever waits for a line looks again."""
        self._news.set()
        self._news = asyncio.Event()

    async def _ask_rows(self, name: str) -> None:
        if name in self._busy:
            return
        self._busy.add(name)
        try:
            rows = await (await self.link(name, MEET_S)).ask(w.AskRows(), w.Rows, MEET_S)
            pools = {pool: w.column(data, "<u8") for pool, data in rows.pools.items()}
            self.directory.replace(name, rows.epoch, rows.sequence, pools)
        except DataError as error:
            # The next beat of that node shows the gap again.
            log.info("rows not had", extra={"node": name, "error": str(error)})
        finally:
            self._busy.discard(name)

    async def _heard(self, said: w.Said) -> w.Said | None:
        match said:
            case w.Beat(node, epoch, sequence, changes):
                if self.directory.is_over(node, epoch):
                    return None
                await self._sign_of_life(node, epoch)
                told = {pool: (w.column(a, "<u8"), w.column(r, "<u8")) for pool, (a, r) in changes.items()}
                if not self.directory.delta(node, epoch, sequence, told):
                    await self._ask_rows(node)
                return None
            case w.Meet(protocol, node, epoch, address, vector):
                if protocol != w.PROTOCOL or vector != handshake_vector():
                    raise BadArgument(f"node {node} computes identities differently", "run one version on all nodes")
                self._know(address)
                if node != self.config.name:
                    await self._says_its_name(node, epoch, address)
                known = tuple(link.address for link in self._links.values() if link.name)
                return w.Met(self.config.name, self.epoch, known)
            case w.AskRows():
                rows = {pool: own.snapshot().tobytes() for pool, own in self.own.items()}
                return w.Rows(self.epoch, self._sequence, rows)
            case _:
                return await self._handle(said)
