"""Sessions of callers: params that their requests share, and how many turns there were. Pure: time is passed in."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from omni_flow.serve.errors import ApiError, bad

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class SessionState:
    """One session of one caller. `key` names it to the runtime: two callers' sessions of one id are two.

    `salt`: the tenant that its requests went to the runtime with.
    """

    __slots__ = ("_now", "created", "id", "key", "live", "params", "salt", "tenant", "turns", "used")

    def __init__(self, tenant: str, id: str, now: Callable[[], float]) -> None:
        self.tenant, self.id, self.key = tenant, id, f"{tenant}:{id}"
        self._now = now
        self.created = self.used = now()
        self.turns = self.live = 0
        self.params: dict[str, Any] = {}
        self.salt = ""

    def begin(self, salt: str) -> None:
        """A request of it starts."""
        self.salt = salt
        self.turns += 1
        self.live += 1
        self.used = self._now()

    def end(self) -> None:
        """A request of it is over."""
        self.live -= 1
        self.used = self._now()

    def as_object(self) -> dict[str, Any]:
        """For `/v1/sessions`."""
        return {
            "id": self.id,
            "object": "session",
            "created": self.created,
            "used": self.used,
            "turns": self.turns,
            "live": self.live,
            "params": self.params,
        }


class Sessions:
    """At most `most`; one that was idle for `idle_s` is forgotten, and when there are too many the longest idle one of
    the caller who has the most, so that nobody loses sessions to another who opens many.

    `on_over` is called with each that is closed or forgotten.
    """

    def __init__(self, most: int, idle_s: float, now: Callable[[], float] = time.time) -> None:
        self._most, self._idle_s, self._now = most, idle_s, now
        self._count = 0
        self._of: dict[str, OrderedDict[str, SessionState]] = {}
        self.on_over: Callable[[SessionState], None] = lambda state: None

    def of(self, tenant: str, id: str) -> SessionState:
        """The session, made at need. Raises ApiError naming `session`."""
        if _ID.fullmatch(id) is None:
            raise bad("a session id is 1 to 128 letters, digits and _ . : -", "session")
        found = self._get(tenant, id)
        if found is None:
            self._make_room()
            self._count += 1
            found = self._of.setdefault(tenant, OrderedDict())[id] = SessionState(tenant, id, self._now)
        self._of[tenant].move_to_end(id)
        return found

    def find(self, tenant: str, id: str) -> SessionState:
        """A session that is there. Raises ApiError 404."""
        found = self._get(tenant, id)
        if found is None:
            raise ApiError(404, f"there is no session {id!r}", code="session_not_found")
        return found

    def _get(self, tenant: str, id: str) -> SessionState | None:
        those = self._of.get(tenant)
        return None if those is None else those.get(id)

    def close(self, tenant: str, id: str) -> SessionState:
        """Forget a session. Raises ApiError 404."""
        found = self.find(tenant, id)
        self._forget(found)
        return found

    def drop_unused(self, state: SessionState) -> None:
        """Its request was refused: a session that has had none, and no params, is not there."""
        if not state.turns and not state.params:
            self._remove(state)

    def list(self, tenant: str) -> list[SessionState]:
        """Those of a caller, the one used last at the end."""
        return [*self._of[tenant].values()] if tenant in self._of else []

    def __len__(self) -> int:
        return self._count

    def expire(self) -> None:
        """Forget those that were idle for too long."""
        now = self._now()
        for state in [state for those in self._of.values() for state in those.values()]:
            if not state.live and now - state.used >= self._idle_s:
                self._forget(state)

    def _make_room(self) -> None:
        """For one more. Sessions with live requests stay."""
        while self._count >= self._most:
            for those in sorted(self._of.values(), key=len, reverse=True):
                oldest = next((state for state in those.values() if not state.live), None)
                if oldest is not None:
                    self._forget(oldest)
                    break
            else:
                return

    def _remove(self, state: SessionState) -> None:
        self._count -= 1
        those = self._of[state.tenant]
        del those[state.id]
        if not those:
            del self._of[state.tenant]

    def _forget(self, state: SessionState) -> None:
        self._remove(state)
        self.on_over(state)
