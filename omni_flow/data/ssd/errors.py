"""Typed errors of the SSD tier. What a sick disk does to one request is no error: that is a miss."""

from omni_flow.data.errors import DataError


class SsdError(DataError):
    """Base of the errors of the SSD tier."""

    code = "ssd"


class DirectoryBusy(SsdError):
    """Another process has the directory."""

    code = "ssd-busy"


class DirectIoUnsupported(SsdError):
    """The file system can't do O_DIRECT and buffered I/O was not allowed."""

    code = "ssd-no-direct"


class BadSsdConfig(SsdError):
    """Sizes that can't work together."""

    code = "ssd-config"


class BufferMismatch(SsdError):
    """A buffer too small for its record, read-only, or not one per key."""

    code = "ssd-buffer"
