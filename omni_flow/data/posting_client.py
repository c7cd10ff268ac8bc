"""A blocking client that may go on before the server has answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from omni_flow.data.client import MemoryManagerClient
from omni_flow.data.errors import CallTimeout, DataError
from omni_flow.data.kv_client import Request
from omni_flow.data.link import failure_of
from omni_flow.data.protocol import ERROR, REPLY, Message, encode

T = TypeVar("T")
_UNREAD: Final = 64
"""Answers that may lie in the socket before they are taken in."""


class Answer(Generic[T]):
    """What a posted request will have brought. Calling it waits for that.

    Calling raises:
        CallTimeout: no reply in time.
        Disconnected: there is no server.
        DataError: what the server says.
    """

    __slots__ = ("_client", "_error", "_read", "_value", "came")

    def __init__(self, client: PostingClient, read: Callable[[Message], T] | None) -> None:
        self._client = client
        self._read = read
        self._error: DataError | None = None
        self.came = False
        self._value: T

    def __call__(self) -> T:
        if not self.came:
            self._client.wait_for(self)
        if self._error is not None:
            raise self._error
        return self._value

    def take(self, reply: Message) -> None:
        """The reply has come; its columns are valid during this call only."""
        self.came = True
        if reply.flags & ERROR:
            self._error = failure_of(reply)
            if self._read is None:
                self._client.failed = self._error
        elif self._read is not None:
            self._value = self._read(reply)


class PostingClient(MemoryManagerClient):
    """`post` sends a request and returns at once; requests take effect in the order in which they were sent.

    A request whose answer nobody reads (`read` is None) and that fails makes the next `post` raise.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "",
        role: str = "client",
        quotas: dict[str, int] | None = None,
        spin: float = 0.0,
    ) -> None:
        self._posted: dict[int, Answer[Any]] = {}
        self.failed: DataError | None = None
        super().__init__(address, name=name, role=role, quotas=quotas, spin=spin)

    def post(self, request: Request, read: Callable[[Message], T] | None = None) -> Answer[T]:
        """Send; `read` makes of the reply what the answer gives.

        Raises:
            Disconnected: there is no server.
            DataError: why an earlier request failed whose answer nobody reads.
        """
        if len(self._posted) > _UNREAD:
            self.take_events()
        if self.failed is not None:
            raise self.failed
        self._request = number = (self._request + 1) & 0xFFFFFFFF or 1
        answer = Answer(self, read)
        self._posted[number] = answer
        self.link.send(encode(request.op, 0, number, self.epoch, request.body, request.columns))
        return answer

    def wait_for(self, answer: Answer[T]) -> None:
        """Take in what comes until this answer has."""
        until = time.monotonic() + self.timeout
        while not answer.came:
            message = self.link.receive(max(0.001, until - time.monotonic()), fds=False)
            if message is None:
                raise CallTimeout(f"no reply within {self.timeout} s", "is the memory manager alive?")
            self._other(message)

    def _other(self, message: Message) -> None:
        answer = self._posted.pop(message.request, None) if message.flags & REPLY else None
        if answer is not None:
            answer.take(message)
        else:
            super()._other(message)
