"""Settings of a node's transfer process."""

from pathlib import Path

import msgspec

from omni_flow.data.arguments import endpoint
from omni_flow.data.errors import BadArgument
from omni_flow.data.transfer.tcp_parts import LEAST_KEY, TcpOptions
from omni_flow.data.zmq_keys import require_safe


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's transfer process.

    Args:
        manager: path of the memory manager's socket.
        name: of this node, unique among the nodes.
        listen: ZMQ endpoint for other nodes. Without `key` it must be on the loopback.
        peers: endpoints of other nodes; one living one is enough, it knows the others.
        advertise: host by which others reach this node, when that is not in `listen`.
        key: secret of all nodes, at least 16 bytes: CURVE for control, HMAC handshake for the tcp driver.
        key_file: a file that holds it, so that it stands on no command line.
        driver: `tcp`, or an installed extra.
        beat_s, silent_s: how often a node tells of itself, and after which silence it counts as dead.
    """

    manager: str
    name: str
    listen: str = "tcp://127.0.0.1:*"
    peers: tuple[str, ...] = ()
    advertise: str = ""
    key: str = ""
    key_file: str = ""
    driver: str = "tcp"
    beat_s: float = 0.5
    silent_s: float = 3.0

    def __post_init__(self) -> None:
        """Raises: BadArgument, an endpoint that is none."""
        endpoint("listen", self.listen)
        for peer in self.peers:
            endpoint("peers", peer)

    def with_key(self) -> "NodeConfig":
        """With the key that the file holds, if one is named. Raises: BadArgument when it can't be read, or is none."""
        if not self.key_file:
            return self
        try:
            key = Path(self.key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadArgument(f"key_file: {error}", "name a text file that this user can read") from error
        if len(key.encode()) < LEAST_KEY:
            raise BadArgument(
                f"key_file: {self.key_file} holds {len(key.encode())} bytes", f"give {LEAST_KEY} at least"
            )
        return msgspec.structs.replace(self, key=key, key_file="")

    def check(self) -> None:
        """Look for what would end the process as soon as it begins.

        Raises:
            DataError: no key where there must be one, or none that will do; a file of it that can't be read.
        """
        config = self.with_key()
        for given in (config.listen, *config.peers):
            require_safe(given, config.key)
        config.driver_options()

    def driver_options(self) -> bytes:
        """Options of the driver as msgpack: it listens where the node listens."""
        host = self.listen.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
        host = "0.0.0.0" if host == "*" else host
        if self.driver == "tcp":
            return msgspec.msgpack.encode(TcpOptions(host=host, key=self.key.encode(), advertise=self.advertise))
        return msgspec.msgpack.encode({"host": self.advertise or host})
