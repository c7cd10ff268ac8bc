"""Who holds which prefix, as the memory managers say: what the `cache_aware` balance of a deployment goes by.

Roles say which KV pages the inputs of a request became (`ctx.prefix`). When a later request begins with the same
pieces, the managers are asked which of those pages they have now. Nobody waits for the answer: all questions of a few
milliseconds go in one message to each manager, and a request is placed by the last answer. Where there is none, or an
old one, what was sent where counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.control.runtime.prefixes import Key, Prefix, Routed
from omni_flow.data.aio_client import AsyncMemoryManagerClient
from omni_flow.data.errors import DataError
from omni_flow.data.protocol import MAX_BATCH

log = logging.getLogger("omni_flow.deploy")

GATHER_S: Final = 0.005
"""How long questions are gathered."""
FRESH_S: Final = 0.25
"""An answer as old as this is asked for again when it is used."""
STALE_S: Final = 5.0
"""An older answer is not used."""
ANSWER_S: Final = 0.5
"""How long a manager may take before it counts as silent."""
MOST_PIECES: Final = 65_536


class _Known:
    """A prompt that some role has made KV of, and how much of it each manager has."""

    __slots__ = ("answered", "held", "keys", "left", "prefix", "sent")

    def __init__(self, keys: tuple[Key, ...], prefix: Prefix) -> None:
        self.keys, self.prefix = keys, prefix
        self.left = len(keys)
        self.held: dict[int, float] = {}
        self.answered = float("-inf")
        self.sent: dict[str, float] = {}


class ManagerHolders:
    """`Holders` of the replicas of a deployment. All of it on one event loop.

    Args:
        addresses: of the memory managers; replica k of a role (`llm/k`) has its pages at manager k modulo their number.
        room: see `Routed`.
    """

    def __init__(self, addresses: Sequence[str], room: int) -> None:
        self._own = Routed(room)
        self._addresses = tuple(addresses)
        self._clients: dict[int, AsyncMemoryManagerClient] = {}
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._of: dict[Key, tuple[_Known, int]] = {}
        self._wanted: dict[int, _Known] = {}
        self._asking: asyncio.Task[None] | None = None

    def held(self, keys: Sequence[Key], replicas: Sequence[str]) -> Mapping[str, int]:
        """See `Holders`."""
        own = self._own.held(keys, replicas)
        known, pieces = self._longest(keys)
        if known is None:
            return own
        now = time.monotonic()
        if now - known.answered > FRESH_S:
            self._want(known)
        if now - known.answered > STALE_S:
            return own
        found = {}
        for replica in replicas:
            share = known.held.get(self._manager_of(replica))
            sent = share is None or known.sent.get(replica, known.answered - 1) > known.answered
            there = 0 if share is None else min(pieces, int(share * len(known.keys)))
            found[replica] = max(there, own.get(replica, 0)) if sent else there
        return found

    def sent(self, keys: Sequence[Key], replica: str) -> None:
        """See `Holders`: until the managers are asked again, it counts as being there."""
        self._own.sent(keys, replica)
        known, _ = self._longest(keys)
        if known is not None:
            known.sent[replica] = time.monotonic()

    def learned(self, keys: Sequence[Key], prefix: Prefix) -> None:
        """See `Holders`. The last prompt that begins with a piece stands for all of them."""
        if not prefix.marks:
            return
        known = _Known(tuple(keys), prefix)
        self._known[id(known)] = known
        for at, key in enumerate(known.keys, 1):
            before = self._of.get(key)
            if before is not None:
                self._less(before[0])
            self._of[key] = (known, at)
        while len(self._of) > MOST_PIECES:
            oldest = next(iter(self._known.values()))
            for key in oldest.keys:
                if self._of[key][0] is oldest:
                    del self._of[key]
            del self._known[id(oldest)]
        self._want(known)

    def _less(self, known: _Known) -> None:
        known.left -= 1
        if not known.left:
            self._known.pop(id(known), None)

    def _longest(self, keys: Sequence[Key]) -> tuple[_Known | None, int]:
        """A known prompt that begins with as many of the keys as possible, and how many they are."""
        return next((found for key in reversed(keys) if (found := self._of.get(key)) is not None), (None, 0))

    def _manager_of(self, replica: str) -> int:
        return int(replica.rpartition("@")[0].rpartition("/")[2]) % len(self._addresses)

    # ---- asking ---------------------------------------------------------------------------------------------

    def _want(self, known: _Known) -> None:
        self._wanted[id(known)] = known
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        try:
            await asyncio.sleep(GATHER_S)
            while self._wanted:
                wanted, self._wanted = list(self._wanted.values()), {}
                for pool in {known.prefix.pool for known in wanted}:
                    mine = [known for known in wanted if known.prefix.pool == pool]
                    keys = [key for known in mine for _, key in known.prefix.marks]
                    now = time.monotonic()
                    answers = await asyncio.gather(*(self._probe(k, pool, keys) for k in range(len(self._addresses))))
                    self._take(mine, answers, now)
        finally:
            self._asking = None

    async def _probe(self, manager: int, pool: str, keys: Sequence[bytes]) -> NDArray[np.uint8] | None:
        """The tiers of each key at one manager; None: it is silent."""
        try:
            async with asyncio.timeout(ANSWER_S):
                client = self._clients.get(manager)
                if client is None:
                    client = await AsyncMemoryManagerClient.connect(
                        self._addresses[manager], name="balance", role="viewer"
                    )
                    self._clients[manager] = client
                batches = [keys[at : at + MAX_BATCH] for at in range(0, len(keys), MAX_BATCH)]
                return np.concatenate([await client.probe(pool, batch) for batch in batches])
        except (DataError, OSError, TimeoutError) as error:
            log.info("a memory manager does not say what it holds, what was sent where counts: %s", error)
            silent = self._clients.pop(manager, None)
            if silent is not None:
                await silent.close()
            return None

    @staticmethod
    def _take(asked: Sequence[_Known], answers: Sequence[NDArray[np.uint8] | None], now: float) -> None:
        start = 0
        for known in asked:
            marks = known.prefix.marks
            known.answered = now
            for manager, tiers in enumerate(answers):
                if tiers is None:
                    known.held.pop(manager, None)
                    continue
                there = tiers[start : start + len(marks)] != 0
                count = len(marks) if there.all() else int(there.argmin())
                known.held[manager] = marks[count - 1][0] / marks[-1][0] if count else 0.0
            start += len(marks)

    async def idle(self) -> None:
        """Wait until nothing is being asked."""
        if self._asking is not None:
            await asyncio.shield(self._asking)

    async def close(self) -> None:
        """End the connections."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
