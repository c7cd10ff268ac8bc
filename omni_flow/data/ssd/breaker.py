"""The breaker that turns a sick disk off. Pure; time is passed in."""

import errno
from enum import Enum
from typing import Literal

What = Literal["read", "write"]
"""Counted apart: a disk that takes writes may still fail every read."""


class Health(Enum):
    """CLOSED: in use. OPEN: off. HALF_OPEN: off, and a probe is on its way."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Opens on a stall, on a full disk, or on several errors in a row; then asks for a probe now and again.

    Args:
        errors_to_open: failed reads in a row, or failed writes in a row, that open it.
        first_wait_s: seconds from opening to the first probe; each failed probe doubles it, up to
            `max_wait_s`.
    """

    def __init__(self, errors_to_open: int = 3, first_wait_s: float = 1.0, max_wait_s: float = 60.0) -> None:
        self._errors_to_open = errors_to_open
        self._first_wait = first_wait_s
        self._max_wait = max_wait_s
        self._wait = first_wait_s
        self._errors = {"read": 0, "write": 0}
        self._probe_at = 0.0
        self.health = Health.CLOSED
        self.reason = ""
        self.opened = 0

    @property
    def closed(self) -> bool:
        """Whether the tier may be used."""
        return self.health is Health.CLOSED

    def succeeded(self, what: What) -> None:
        """Notes an I/O that went well."""
        self._errors[what] = 0

    def failed(self, what: What, error: OSError, now: float) -> None:
        """Notes an I/O that raised."""
        self._errors[what] += 1
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        if self.closed and (full or self._errors[what] >= self._errors_to_open):
            self._open(f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}", now)

    def stalled(self, what: str, now: float) -> None:
        """Notes an I/O past its deadline."""
        if self.closed:
            self._open(f"stalled: {what}", now)

    def _open(self, reason: str, now: float) -> None:
        self.health, self.reason = Health.OPEN, reason
        self._probe_at = now + self._wait
        self.opened += 1

    def until_probe(self, now: float) -> float | None:
        """Returns the seconds until a probe is due, None when none is wanted."""
        return max(self._probe_at - now, 0.0) if self.health is Health.OPEN else None

    def probing(self) -> None:
        """The caller begins a probe."""
        self.health = Health.HALF_OPEN

    def probed(self, error: OSError | None, now: float) -> None:
        """The probe ended: the tier is on again, or the next probe comes after twice the time."""
        if error is None:
            self.health, self.reason = Health.CLOSED, ""
            self._errors, self._wait = {"read": 0, "write": 0}, self._first_wait
            return
        self._wait = min(self._wait * 2, self._max_wait)
        self.health, self.reason = Health.OPEN, f"probe failed: {error}"
        self._probe_at = now + self._wait
