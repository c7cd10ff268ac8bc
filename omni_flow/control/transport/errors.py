"""What a transport raises. A peer that is gone is never one of these: that is said through `on_lost`."""


class TransportError(Exception):
    """Base of everything here."""


class MessageTooLarge(TransportError):
    """One message is larger, encoded, than a transport carries. Nothing of its batch was sent."""

    def __init__(self, address: str, size: int, limit: int) -> None:
        super().__init__(
            f"a message to {address} has {size} bytes encoded, the limit is {limit}; "
            "send large payloads by reference (TensorRef) instead of inline"
        )
        self.address, self.size, self.limit = address, size, limit


class AddressError(TransportError):
    """An address that this transport cannot serve or reach."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"address {address!r}: {why}")
        self.address, self.why = address, why


class AddressTooLong(AddressError):
    """A socket path over the kernel's limit of 107 bytes."""

    def __init__(self, address: str, size: int, limit: int) -> None:
        super().__init__(
            address, f"the socket path has {size} bytes, the kernel allows {limit}; use a shorter directory"
        )
        self.size, self.limit = size, limit


class AddressInUse(AddressError):
    """Somebody alive listens there."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "a live process listens there; stop it or choose another name")


class InsecureAddress(AddressError):
    """A tcp address that other machines reach, without a shared key."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "not a loopback address and no shared key; pass key=... or use tcp://127.0.0.1")


class WeakKey(TransportError):
    """A shared key that is too short to be a secret."""

    def __init__(self, size: int, least: int) -> None:
        super().__init__(
            f"the shared key has {size} bytes, at least {least} are needed; make one with `openssl rand -hex 32`"
        )


class InsecureDirectory(TransportError):
    """A socket directory that others may enter or own."""

    def __init__(self, directory: str, why: str, mend: str) -> None:
        super().__init__(f"socket directory {directory}: {why}; {mend}")
        self.directory = directory


class ProtocolError(TransportError):
    """A peer sent what the protocol does not allow. Ends that peer's channel, never leaves the transport."""


class VersionMismatch(ProtocolError):
    """A peer of another protocol version; `address` is where it listens."""

    def __init__(self, address: str, theirs: int, ours: int) -> None:
        super().__init__(f"protocol version {theirs} of the peer, {ours} here: run one release of omni-flow")
        self.address = address


class TransportClosed(TransportError):
    """Used before `start()` or after `close()`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the transport {what}")
