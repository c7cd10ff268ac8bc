"""Seeing a memory manager: its numbers, who is connected, what is held by whom, violated invariants.

For people and monitors. What pages and arrays are called, and what is in them, is never shown. Some of it walks whole
tables, so ask as often as somebody looks, not in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from omni_flow.data.messages import SessionsAfter, Tree
from omni_flow.data.protocol import Message, Op
from omni_flow.data.session import Session

if TYPE_CHECKING:
    from omni_flow.data.server import Server

_ROWS: Final = 20
"""Sessions in one message, in which they fit whatever their names."""


class Inspection:
    """Answers `STATS`, `INSPECT`, `OVERVIEW` and `CHECK`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def ops(self) -> Mapping[int, Callable[[Session, Message], None]]:
        return {
            Op.STATS: lambda session, message: session.reply(message, Tree(self.stats())),
            Op.INSPECT: self._inspect,
            Op.OVERVIEW: lambda session, message: session.reply(message, Tree(self.overview())),
            Op.CHECK: self._check,
        }

    def stats(self) -> dict[str, int | float]:
        """Plain numbers of the server and all services."""
        server = self._server
        numbers: dict[str, int | float] = dict(server.counters)
        numbers["foreign"] = server.front.foreign
        numbers["sessions"] = len(server.sessions)
        numbers["reclaims_running"] = len(server.reclaims)
        numbers["reclaim_last_s"] = server.reclaim_last_s
        numbers["reclaim_seen_at"] = server.reclaim_seen_at
        numbers["reclaim_slice_worst_s"] = server.reclaim_worst_s
        numbers.update(server.arenas.stats())
        for service in server.services:
            numbers.update(service.stats())
        return numbers

    def sessions(self, after: int) -> list[dict[str, Any]]:
        """The first sessions with a larger number, and what each holds."""
        there = [s for s in self._server.sessions.values() if s.ready and s.id > after]
        return [self._row(session) for session in sorted(there, key=lambda s: s.id)[:_ROWS]]

    def _row(self, session: Session) -> dict[str, Any]:
        row: dict[str, Any] = {
            "session": session.id,
            "pid": session.pid,
            "uid": session.uid,
            "name": session.name,
            "role": session.role,
        }
        for service in self._server.services:
            row |= service.held(session)
        return row

    def overview(self) -> dict[str, Any]:
        """What there is of the things that all services keep, and whose it is."""
        found: dict[str, Any] = {}
        for service in self._server.services:
            found |= service.overview()
        return found

    def _inspect(self, session: Session, message: Message) -> None:
        session.reply(message, Tree(self.sessions(message.body(SessionsAfter).session)))

    def _check(self, session: Session, message: Message) -> None:
        faults: list[str] = []
        for service in self._server.services:
            faults.extend(service.check())
        session.reply(message, Tree(faults[:100]))
