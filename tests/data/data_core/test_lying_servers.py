"""What a client makes of a manager that answers otherwise than agreed: an error, and nothing left open."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import BadMessage, DataError, Refused
from omni_flow.data.messages import ArenaInfo, TempLeased, Welcome
from omni_flow.data.protocol import ERROR, FDS, REPLY, Failure, Op, decode, encode

MEMORY = ArenaInfo("temp", 4096, "memfd", 4096)
ON_DEVICE = ArenaInfo("temp", 4096, "cuda-ipc", 4096, 0, b"handle")
Answer = Callable[[int], bytes]


def answer(body: msgspec.Struct, flags: int = REPLY | FDS, op: int = Op.ARENA) -> Answer:
    return lambda request: encode(op, flags, request, 7, body)


class Liar:
    """A manager that welcomes each client and answers everything else with `made` and so many descriptors."""

    def __init__(self, path: str, made: Answer, fds: int) -> None:
        self.path = path
        self._made, self._fds = made, fds
        self._file = os.memfd_create("lie")
        os.ftruncate(self._file, 4096)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen()
        self._links: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        try:
            while True:
                self._links.append(link := self._listener.accept()[0])
                while raw := link.recv(1 << 16):
                    self._answer(link, raw)
        except OSError:
            return

    def _answer(self, link: socket.socket, raw: bytes) -> None:
        message = decode(raw, len(raw))
        if message.op == Op.HELLO:
            welcome = Welcome(1, 7, (), ("temp",), 4096, self.path, 1, "node", True)
            link.send(encode(Op.HELLO, REPLY, message.request, 7, welcome))
        else:
            socket.send_fds(link, [self._made(message.request)], [self._file] * self._fds)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._links):
            one.close()
        os.close(self._file)


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[Callable[[Answer, int], Liar]]:
    made: list[Liar] = []

    def make(answered: Answer, fds: int) -> Liar:
        made.append(Liar(str(tmp_path / "m.sock"), answered, fds))
        return made[-1]

    yield make
    for one in made:
        one.close()


def open_lies() -> int:
    """How many descriptors of the file that liars send are open in this process, which is theirs too."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(fd))
    return sum("memfd:lie" in link for link in links)


@pytest.mark.parametrize(
    ("made", "fds", "error"),
    [
        (answer(MEMORY), 2, BadMessage),
        (answer(MEMORY), 0, BadMessage),
        (answer(ON_DEVICE), 1, BadMessage),
        (answer(TempLeased(4096)), 1, BadMessage),
        (answer(Failure("refused", "no"), REPLY | ERROR | FDS), 1, Refused),
        (lambda _request: b"no message at all", 1, BadMessage),
    ],
    ids=["two descriptors", "none", "one with a handle", "another body", "an error", "no message"],
)
@pytest.mark.parametrize("way", ["arena", "descriptor"])
def test_descriptors_that_come_with_a_wrong_reply_are_closed(
    liar: Callable[[Answer, int], Liar], made: Answer, fds: int, error: type[DataError], way: str
) -> None:
    with MemoryManagerClient(liar(made, fds).path) as client:
        with pytest.raises(error):
            client.arena("temp") if way == "arena" else client.descriptor("temp", write=False)
        assert open_lies() == 1


def test_descriptors_that_nobody_asked_for_are_not_taken(liar: Callable[[Answer, int], Liar]) -> None:
    with MemoryManagerClient(liar(answer(MEMORY, op=Op.PING), 1).path) as client:
        client.ping()
        assert open_lies() == 1
