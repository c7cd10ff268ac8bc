"""The manager's half of the directory: tells the node process what comes and goes, and passes questions on to it."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_flow.data.errors import BadArgument, BadToken, NoMover, Refused, UnknownName
from omni_flow.data.kv_pool import KvPool
from omni_flow.data.messages import PoolName
from omni_flow.data.protocol import MAX_BATCH, Message
from omni_flow.data.session import BaseService, Handler, Session
from omni_flow.data.transfer import messages as m
from omni_flow.data.transfer.directory import U64, prefixes

_FLUSH_S: Final = 0.02
_FLUSH_ROWS: Final = 4096
_EVENT_ROWS: Final = 8192
_MAX_NUMBERS: Final = 64


class DirectoryService(BaseService):
    """Costs nothing while no node process watches. One at a time may: the last to ask."""

    def __init__(self, pools: Mapping[str, KvPool]) -> None:
        self._pools = pools
        self._watcher: Session | None = None
        self._pending: dict[str, list[tuple[U64, bool]]] = {name: [] for name in pools}
        self._rows = 0
        self._since = 0.0
        self._asked: dict[int, tuple[Session, Message]] = {}
        self._numbers = itertools.count(1)
        self._told: dict[str, int] = {}

    @property
    def ops(self) -> Mapping[int, Handler]:
        return {
            m.DIR_WATCH: self._watch,
            m.DIR_ROWS: self._page,
            m.DIR_LOCATE: self._locate,
            m.DIR_ANSWER: self._answer,
            m.DIR_REPORT: self._report,
        }

    def closed(self, session: Session) -> Iterator[None]:
        self._asked = {id: asked for id, asked in self._asked.items() if asked[0] is not session}
        if session is self._watcher:
            self._leave()
        yield

    def tick(self, now: float) -> float | None:
        if not self._rows:
            return None
        if self._rows < _FLUSH_ROWS and now < self._since + _FLUSH_S:
            return self._since + _FLUSH_S
        self._flush()
        return None

    def stats(self) -> dict[str, int | float]:
        told = {f"transfer_{name}": number for name, number in self._told.items()}
        return {"directory_watched": int(self._watcher is not None), "directory_asks": len(self._asked), **told}

    def _watch(self, session: Session, message: Message) -> None:
        if session.role != "mover":
            raise Refused(f"session {session.id} is no mover", "say HELLO with role mover")
        if self._watcher is not None:
            self._leave()
        self._watcher = session
        for name, pool in self._pools.items():
            pool.table.watch = self._noter(name, pool)
        session.reply(message, m.DirPools(tuple(self._pools)))

    def _noter(self, name: str, pool: KvPool) -> Callable[[NDArray[np.uint32], bool], None]:
        pending, keys = self._pending[name], pool.table.keys

        def note(rows: NDArray[np.uint32], there: bool) -> None:
            if not self._rows:
                self._since = time.monotonic()
            self._rows += len(rows)
            pending.append((prefixes(keys[rows]), there))

        return note

    def _leave(self) -> None:
        self._watcher = None
        self._told = {}
        for name, pool in self._pools.items():
            pool.table.watch = None
            self._pending[name].clear()
        self._rows = 0
        asked, self._asked = self._asked, {}
        for session, message in asked.values():
            session.fail(message, NoMover("the node process ended", "ask again"))

    def _flush(self) -> None:
        """Send what has changed, in order."""
        self._rows = 0
        for name, pending in self._pending.items():
            if not pending or self._watcher is None:
                continue
            numbers = np.concatenate([part for part, _ in pending])
            there = np.concatenate([np.full(len(part), present, np.uint8) for part, present in pending])
            pending.clear()
            for at in range(0, len(numbers), _EVENT_ROWS):
                cut = slice(at, at + _EVENT_ROWS)
                self._watcher.event(m.DIR_CHANGED, m.DirPool(name), (numbers[cut], there[cut]))

    def _pool(self, name: str) -> KvPool:
        found = self._pools.get(name)
        if found is None:
            raise UnknownName(f"no pool {name!r}", f"there are {', '.join(self._pools) or 'none'}")
        return found

    def _page(self, session: Session, message: Message) -> None:
        """Rows as they are now; what changes later comes as events behind this reply."""
        body = message.body(m.DirRowsAsk)
        table = self._pool(body.pool).table
        if session is not self._watcher:
            raise Refused(f"session {session.id} does not watch the directory", "watch first")
        if body.start < 0:
            raise BadArgument(f"row {body.start}", "rows count from 0")
        self._flush()
        end = min(body.start + m.ROWS_A_PAGE, table.capacity)
        live = body.start + np.flatnonzero(table.tiers[body.start : end])
        following = end if end < table.capacity else -1
        session.reply(message, m.DirRows(following), (prefixes(table.keys[live]),))

    def _locate(self, session: Session, message: Message) -> None:
        name = message.body(PoolName).pool
        self._pool(name)
        keys = message.column(0, "key")
        if len(keys) > MAX_BATCH:
            raise BadArgument(f"{len(keys)} keys at once", f"at most {MAX_BATCH}")
        if self._watcher is None:
            raise NoMover("no node process is connected", "run the memory manager with a transfer process")
        id = next(self._numbers)
        self._asked[id] = (session, message)
        self._watcher.event(m.DIR_ASK, m.DirAsk(id, name), (keys,))

    def _answer(self, session: Session, message: Message) -> None:
        body = message.body(m.DirAnswer)
        if session is not self._watcher:
            raise Refused(f"session {session.id} does not watch the directory", "watch first")
        asked = self._asked.pop(body.id, None)
        session.reply(message)
        if asked is None:
            raise BadToken(f"nobody waits for answer {body.id}")
        asked[0].reply(asked[1], body, (message.column(0, "|u1"),))

    def _report(self, session: Session, message: Message) -> None:
        numbers = message.body(m.DirReport).numbers
        if session is not self._watcher:
            raise Refused(f"session {session.id} does not watch the directory", "watch first")
        if len(numbers) > _MAX_NUMBERS or any(len(name) > _MAX_NUMBERS for name in numbers):
            raise BadArgument(f"{len(numbers)} counters", f"at most {_MAX_NUMBERS}, with names as short")
        self._told = numbers
        session.reply(message)
