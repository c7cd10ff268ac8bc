"""The ops of the TempBuffer pool: from messages and ledgers to `TempPool`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from omni_flow.data.arena import Arena
from omni_flow.data.errors import DataError, Refused
from omni_flow.data.kv_service import deadline_of
from omni_flow.data.ledger import BLOCK, CELLS, LEDGER_BYTES, ROW
from omni_flow.data.messages import TempLease, TempLeased, TempRetract
from omni_flow.data.protocol import Message, Op
from omni_flow.data.session import BaseService, Handler, Session
from omni_flow.data.temp_account import TempAccount
from omni_flow.data.temp_overview import held, overview
from omni_flow.data.temp_pool import TempPool
from omni_flow.data.temp_room import Leased


class TempService(BaseService):
    """The TempBuffer pool of the node.

    Args:
        size: bytes of the block area.
        large: bytes of the area for larger buffers.
        client_bytes, orphan_s: see `ServerConfig`.
    """

    def __init__(self, size: int, large: int, client_bytes: int, orphan_s: float) -> None:
        rows = (size + large) // BLOCK + 1
        self.table = Arena.create("temp-slots", rows * ROW * 4, huge=False)
        table = self.table.numpy(0, (rows * ROW,), np.uint32)
        first = secrets.randbits(32)  # so that descriptors of an earlier manager are good for nothing here
        table[:] = first - 1 & 0xFFFFFFFF
        table[::ROW] = first
        self._sessions: dict[int, Session] = {}
        self.pool = TempPool(size, large, client_bytes, orphan_s, table.data)
        self.pool.pressure = self._pressure

    @property
    def ops(self) -> Mapping[int, Handler]:
        return {
            Op.T_LEASE: self._lease,
            Op.T_FLUSH: self._flush,
            Op.T_RETURN: self._return,
            Op.T_RETRACT: self._retract,
            Op.T_SETTLE: self._settle,
            Op.T_RENEW: self._renew,
        }

    def _pressure(self) -> None:
        """Ask all clients for the slots in their magazines: who waits may itself keep some of another size."""
        for session in self._sessions.values():
            session.event(Op.T_TRIM)

    def opened(self, session: Session) -> None:
        self.pool.open(session.id, session.pid, session.name or session.role)

    def ledger(self, session: Session, _name: str) -> Arena:
        """The ledger of a session, made on first use."""
        arena = session.state.get("ledger")
        if isinstance(arena, Arena):
            return arena
        arena = Arena.create("temp-ledger", LEDGER_BYTES, huge=False, populate="lazy")
        session.state["ledger"] = arena
        self._sessions[session.id] = session
        self.pool.accounts[session.id].map(arena.numpy(0, (LEDGER_BYTES // (4 * CELLS), CELLS), np.uint32))
        return arena

    def slots(self, _session: Session, _name: str) -> Arena:
        """The table of slots."""
        return self.table

    def closed(self, session: Session) -> Iterator[None]:
        self._sessions.pop(session.id, None)
        yield from self.pool.close(session.id, time.monotonic())
        arena = session.state.pop("ledger", None)
        if isinstance(arena, Arena):
            arena.close()

    def tick(self, now: float) -> float | None:
        return self.pool.tick(now)

    def _account(self, session: Session) -> TempAccount:
        if session.read_only:
            raise Refused(f"session {session.id} is read-only", "connect without read_only to make buffers")
        return self.pool.accounts[session.id]

    def _lease(self, session: Session, message: Message) -> None:
        body = message.body(TempLease)
        account = self._account(session)

        def taken(size: int, leased: Leased) -> None:
            session.reply(message, TempLeased(size), tuple(np.array(leased, np.uint32).T.copy()))

        def failed(error: DataError) -> None:
            session.fail(message, error)

        now = time.monotonic()
        until = deadline_of(body.timeout_ms, now)
        self.pool.lease(account, body.size, body.count, until, now, taken, failed)

    def _flush(self, session: Session, message: Message) -> None:
        """The bell of a client that has released. Answered only if it has a request id."""
        if self.pool.harvest([self.pool.accounts[session.id]]):
            self.pool.pump()
        if message.request:
            session.reply(message)

    def _renew(self, session: Session, message: Message) -> None:
        """The bell of a client whose slots run low: whoever has released one of them. Answered only if it has an id."""
        self.pool.harvest_all()
        self.pool.pump()
        if message.request:
            session.reply(message)

    def _return(self, session: Session, message: Message) -> None:
        """Answered only if it has a request id."""
        entries = message.column(0, "<u4").tolist()
        self.pool.give_back(self._account(session), entries)
        if message.request:
            session.reply(message)
        self.pool.pump()

    def _retract(self, session: Session, message: Message) -> None:
        body = message.body(TempRetract)
        self.pool.retract(self._account(session), body.slot, body.generation, body.shares)
        session.reply(message)
        self.pool.pump()

    def _settle(self, session: Session, message: Message) -> None:
        """Answered only if it has a request id."""
        slots = message.column(0, "<u4")
        generations = message.column(1, "<u4", len(slots))
        pairs = list(zip(slots.tolist(), generations.tolist(), strict=True))
        self.pool.settle(self.pool.accounts[session.id], pairs, time.monotonic())
        if message.request:
            session.reply(message)

    def stats(self) -> dict[str, int | float]:
        pool = self.pool
        numbers: dict[str, int | float] = {f"temp_{name}": value for name, value in pool.counters.items()}
        numbers["temp_bytes"] = pool.capacity()
        numbers["temp_free_bytes"] = pool.free_bytes()
        numbers["temp_largest_free"] = max(pool.blocks.largest_free(), pool.extents.largest_free())
        numbers["temp_slots"] = len(pool.slots)
        numbers["temp_published"] = pool.published()
        numbers["temp_orphans"] = len(pool.orphans) + len(pool.closing)
        numbers["temp_waiting"] = len(pool.waits) + sum(len(a.own_wait) for a in pool.accounts.values())
        return numbers

    def held(self, session: Session) -> dict[str, Any]:
        """`temp`: of a session that uses TempBuffers."""
        return {"temp": held(self.pool.accounts[session.id])} if session.id in self._sessions else {}

    def overview(self) -> dict[str, Any]:
        """`temp`: slots by size, and those without an owner."""
        return {"temp": overview(self.pool)}

    def check(self) -> list[str]:
        return [f"temp: {fault}" for fault in self.pool.check_integrity()]
