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

    __slots__ = ("_now", "created", "id", "key", "live", "params", "salt", "turns", "used")

    def __init__(self, tenant: str, id: str, now: Callable[[], float]) -> None:
        self.id, self.key = id, f"{tenant}:{id}"
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
    """At most `most`; one that was idle for `idle_s` is forgotten, and the longest idle one when there are too many.

    `on_over` is called with each that is closed or forgotten.
    """

    def __init__(self, most: int, idle_s: float, now: Callable[[], float] = time.time) -> None:
        self._most, self._idle_s, self._now = most, idle_s, now
        self._all: OrderedDict[str, SessionState] = OrderedDict()
        self.on_over: Callable[[SessionState], None] = lambda state: None

    def of(self, tenant: str, id: str) -> SessionState:
        """The session, made at need. Raises ApiError naming `session`."""
        if _ID.fullmatch(id) is None:
            raise bad("a session id is 1 to 128 letters, digits and _ . : -", "session")
        key = f"{tenant}:{id}"
        found = self._all.get(key)
        if found is None:
            self._make_room()
            found = self._all[key] = SessionState(tenant, id, self._now)
        self._all.move_to_end(key)
        return found

    def find(self, tenant: str, id: str) -> SessionState:
        """A session that is there. Raises ApiError 404."""
        found = self._all.get(f"{tenant}:{id}")
        if found is None:
            raise ApiError(404, f"there is no session {id!r}", code="session_not_found")
        return found

    def close(self, tenant: str, id: str) -> SessionState:
        """Forget a session. Raises ApiError 404."""
        found = self.find(tenant, id)
        self._forget(found)
        return found

    def drop_unused(self, state: SessionState) -> None:
        """Its request was refused: a session that has had none, and no params, is not there."""
        if not state.turns and not state.params:
            del self._all[state.key]

    def list(self, tenant: str) -> list[SessionState]:
        """Those of a caller, the one used last at the end."""
        return [state for key, state in self._all.items() if key.startswith(f"{tenant}:")]

    def __len__(self) -> int:
        return len(self._all)

    def expire(self) -> None:
        """Forget those that were idle for too long."""
        now = self._now()
        for state in list(self._all.values()):
            if not state.live and now - state.used >= self._idle_s:
                self._forget(state)

    def _make_room(self) -> None:
        """For one more. Least recently used ones stand first; those with live requests stay."""
        while len(self._all) >= self._most:
            oldest = next((state for state in self._all.values() if not state.live), None)
            if oldest is None:
                return
            self._forget(oldest)

    def _forget(self, state: SessionState) -> None:
        del self._all[state.key]
        self.on_over(state)
