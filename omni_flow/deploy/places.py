"""Places: where replicas live one after another, and when a dead one is started again. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

BACKOFF_S: Final = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
"""Waits before the restarts after quick deaths; after one more the place is down."""
SETTLED_S: Final = 30.0
"""A replica that was up this long did not die quickly."""

STARTING, UP, LEAVING, DOWN, DEGRADED = "starting", "up", "leaving", "down", "degraded"


class PlaceStatus(msgspec.Struct, frozen=True):
    """One place of a role. `state`: starting, up, leaving or down. `cause`: why it can't serve for now, or of the last
    death; empty if none died."""

    place: str
    state: str
    pid: int
    epoch: int
    restarts: int
    load_s: float
    cause: str


class RoleStatus(msgspec.Struct, frozen=True):
    """A role. `state`: up (every place is), degraded (some are), starting (none yet), down (none, and none will)."""

    role: str
    state: str
    replicas: list[PlaceStatus]


class Place:
    """One place (`tts/0`): the state of its present incarnation and the memory of those before.

    `address` is where the present incarnation was told to listen, `blame` why it is being killed, if the supervisor
    does that, `ailing` why it can't serve for now though its process lives, if it says so.
    """

    def __init__(
        self, name: str, role: int, role_name: str, backoff: Sequence[float] = BACKOFF_S, first: int = 0
    ) -> None:
        """`first`: the epoch of its first incarnation; ids never come again, not even after the place was given up."""
        self.name = name
        self.role = role
        self.role_name = role_name
        self.state = STARTING
        self.epoch = first - 1
        self._first = first
        self.pid = 0
        self.load_s = 0.0
        self.cause = ""
        self.blame = ""
        self.ailing = ""
        self.address = ""
        self._up_since: float | None = None
        self._quick = 0
        self._backoff = backoff

    @property
    def id(self) -> str:
        """The id of the present incarnation."""
        return f"{self.name}@{self.epoch}"

    def start(self) -> None:
        """A new incarnation is being started."""
        self.epoch += 1
        self.pid = 0
        self.blame = self.ailing = ""
        self.state = STARTING

    def up(self, now: float, load_s: float) -> None:
        """The present incarnation takes requests."""
        if self.state == STARTING:
            self.state = UP
        self.load_s = load_s
        self._up_since = now

    def died(self, now: float, cause: str) -> float | None:
        """The present incarnation has ended. How many seconds from now to start the next; None: never."""
        self.cause = cause
        self.pid = 0
        if self.state in (LEAVING, DOWN):
            self.state = DOWN
            return None
        if self._up_since is not None and now - self._up_since >= SETTLED_S:
            self._quick = 0
        self._up_since = None
        if self._quick == len(self._backoff):
            self.state = DOWN
            return None
        self.state = STARTING
        wait = self._backoff[self._quick]
        self._quick += 1
        return wait

    def status(self) -> PlaceStatus:
        """For people."""
        restarts = max(self.epoch - self._first, 0)
        state = STARTING if self.state == UP and self.ailing else self.state
        cause = self.ailing or self.cause
        return PlaceStatus(self.name, state, self.pid, self.epoch, restarts, self.load_s, cause)


def role_state(states: Sequence[str]) -> str:
    """The state of a role from those of its places; leaving ones don't count."""
    counted = [state for state in states if state != LEAVING]
    if counted and all(state == UP for state in counted):
        return UP
    if UP in counted:
        return DEGRADED
    return STARTING if STARTING in counted else DOWN
