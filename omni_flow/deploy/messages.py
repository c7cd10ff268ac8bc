"""What launcher and nursery say to each other: one msgspec struct per packet of their socket pair."""

from __future__ import annotations

from typing import Final

import msgspec

EXIT_LOAD: Final = 70
"""Status of a worker whose role could not be loaded."""
EXIT_STUCK: Final = 71
"""Status of a worker one of whose threads outlived its request."""
EXIT_STALLED: Final = 72
"""Status of a worker whose event loop did not turn."""
EXIT_BROKEN: Final = 73
"""Status of a worker that failed outside of role code."""


class Setup(msgspec.Struct, frozen=True, tag=0):
    """The first order: what all workers of a deployment share.

    `registry` is the launcher's address. `credit` None: the plan's. `run_dir` is removed by the nursery if the launcher
    dies. `key` encrypts and authenticates `tcp`. `memory`: the sockets of the memory managers, if there are any:
    tensors lie at the first, the KV pools of replica k at number k modulo their count.
    """

    registry: str
    run_dir: str
    credit: int | None = None
    grace_s: float = 5.0
    stall_s: float = 30.0
    log_level: str = "INFO"
    key: str | None = None
    memory: tuple[str, ...] = ()


class Start(msgspec.Struct, frozen=True, tag=1):
    """Start incarnation `epoch` of a place (`tts/0`), which hosts the role of index `role`, listening at `address`."""

    place: str
    epoch: int
    role: int
    address: str

    @property
    def id(self) -> str:
        """The id of the incarnation."""
        return f"{self.place}@{self.epoch}"


class Signal(msgspec.Struct, frozen=True, tag=2):
    """Send a signal to a worker. The nursery is its parent, so the pid can't be another process's by now."""

    pid: int
    signum: int


class Stop(msgspec.Struct, frozen=True, tag=3):
    """End all workers: SIGTERM now, SIGKILL after `grace_s`; then the nursery ends."""

    grace_s: float


class Ready(msgspec.Struct, frozen=True, tag=10):
    """The nursery has the graph. `names` is the digest of the plan's names."""

    names: str


class Broken(msgspec.Struct, frozen=True, tag=11):
    """The nursery could not get the graph."""

    cause: str


class Started(msgspec.Struct, frozen=True, tag=12):
    """A worker was forked."""

    place: str
    epoch: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=13):
    """A worker ended. `status`: exit status, or minus the signal's number. `cause` and `trace`: what it said itself."""

    place: str
    epoch: int
    pid: int
    status: int
    cause: str = ""
    trace: str = ""


class Ending(msgspec.Struct, frozen=True):
    """What a worker leaves in its report pipe before it ends by itself."""

    cause: str
    trace: str = ""


Order = Setup | Start | Signal | Stop
Word = Ready | Broken | Started | Exited

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_word = msgspec.msgpack.Decoder(Word).decode
decode_ending = msgspec.msgpack.Decoder(Ending).decode

PACKET: Final = 65_536
"""Most bytes of one packet between launcher and nursery."""
REPORT_BYTES: Final = 65_536
"""Most bytes of a worker's last words: a pipe takes them without a reader."""
