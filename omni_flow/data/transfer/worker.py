"""Main of a driver's process: `python -m omni_flow.data.transfer.worker FD`, started by `DriverHost`.

It lives as long as its control socket. A defect in any thread ends the whole process: the host then reports every job
as failed, which is better than a job that never ends.
"""

import contextlib
import os
import socket
import sys
import threading

import msgspec

from omni_flow.data.transfer.base import Driver, Outcome
from omni_flow.data.transfer.control import (
    AskProgress,
    Cancel,
    Channel,
    Configure,
    Ended,
    Ready,
    Refused,
    Register,
    Report,
    Start,
    ToWorker,
    close_all,
)
from omni_flow.data.transfer.errors import BadJob, TransferError
from omni_flow.data.transfer.registry import make_driver


def main(argv: list[str]) -> int:
    """Serve one host. Returns 0 when the host has ended, 2 when the driver could not be made."""
    threading.excepthook = _defect
    decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
    channel = Channel(socket.socket(fileno=int(argv[1])), decoder)

    def done(outcome: Outcome) -> None:
        # The host may be gone; the main thread sees the same end.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.send(Ended(outcome))

    first = channel.receive()
    if first is None:
        return 0
    try:
        if not isinstance(first[0], Configure):
            raise BadJob("the first frame configures the driver")
        driver = make_driver(first[0].driver, first[0].options, done)
    except TransferError as error:
        channel.send(Refused(error.code, str(error)))
        return 2
    except OSError as error:
        channel.send(Refused(TransferError.code, f"the driver cannot listen: {error}"))
        return 2
    channel.send(Ready(driver.endpoint()))
    with contextlib.suppress(ConnectionError):
        while (frame := channel.receive()) is not None:
            _handle(driver, channel, *frame)
    return 0


def _handle(driver: Driver, channel: Channel[ToWorker], message: ToWorker, fds: list[int]) -> None:
    match message:
        case Start(job):
            driver.start(job)
        case Cancel(id):
            driver.cancel(id)
        case AskProgress(id):
            channel.send(Report(driver.progress(id)))
        case Register(arena, size, access):
            try:
                driver.register_arena(arena, fds[0], size, access)
            except TransferError as error:
                channel.send(Refused(error.code, str(error)))
            else:
                channel.send(Ready(driver.endpoint()))
            finally:
                close_all(fds)
        case Configure():
            channel.send(Refused("BadJob", "the driver is configured already"))


def _defect(args: threading.ExceptHookArgs) -> None:
    sys.__excepthook__(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    os._exit(70)


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stderr.flush()
    # Not sys.exit: threads of third-party transports must not hold up, or crash, the end of a process without state.
    os._exit(code)
