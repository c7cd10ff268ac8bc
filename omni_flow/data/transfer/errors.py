"""Typed failures of a transfer. They cross process and node borders as (code, text): `from_code` rebuilds them."""

from omni_flow.data.errors import DataError


class TransferError(DataError):
    """A transfer that did not move all its bytes."""

    code = "transfer"


class BadJob(TransferError):
    """Spans, arenas or options that cannot be right; nothing was moved."""

    code = "bad-job"


class UnknownArena(TransferError):
    """An arena that this side, or the peer, has not registered."""

    code = "unknown-arena"


class OutOfBounds(TransferError):
    """A span that leaves its arena."""

    code = "out-of-bounds"


class AccessDenied(TransferError):
    """The peer did not register the arena for this direction."""

    code = "access-denied"


class PeerUnreachable(TransferError):
    """No connection, or it broke more often than the limit without one chunk getting through."""

    code = "peer-unreachable"


class PeerRestarted(TransferError):
    """The endpoint is of an earlier life of the peer's driver; ask its manager for the present one."""

    code = "peer-restarted"


class AuthRefused(TransferError):
    """The two sides do not hold the same key."""

    code = "auth-refused"


class ChecksumMismatch(TransferError):
    """A chunk arrived with other bytes than were sent, also when asked again; the page may have been reused."""

    code = "checksum-mismatch"


class DeadlineExceeded(TransferError):
    """The job's time was up; the text says how much had been moved."""

    code = "deadline-exceeded"


class Cancelled(TransferError):
    """Cancelled by its owner."""

    code = "cancelled"


class DriverDied(TransferError):
    """The driver's process ended; `DriverHost.restart()` starts another and registers the arenas again."""

    code = "driver-died"


class DriverAbsent(TransferError):
    """A driver whose extra is not installed; the text says which."""

    code = "driver-absent"


class NativeFailure(TransferError):
    """A third-party transport said no."""

    code = "native-failure"
