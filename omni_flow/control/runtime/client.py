"""What users hold: sessions and requests, asynchronous and plain.

`AsyncClient` works on the event loop of its gateway. `Client` is the same from any thread: it hands each call to that
loop and waits. Both are made by a deployment (`omni_flow.launch`, `omni_flow.alaunch`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from omni_flow.control.facts import Failure
from omni_flow.control.request import Outcome
from omni_flow.control.runtime.gateway import Gateway
from omni_flow.control.runtime.live_request import LiveRequest, Span

T = TypeVar("T")


class AsyncRequest:
    """A request under way. Iterate it for (output, value) as they come, or await `result()`, or both in this order."""

    def __init__(self, live: LiveRequest) -> None:
        self._live = live

    @property
    def id(self) -> str:
        """Unique among all gateways of a deployment."""
        return f"{self._live.info.gateway}/{self._live.info.number}"

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None while it runs."""
        return self._live.outcome

    @property
    def failures(self) -> Mapping[str, Failure]:
        """The failed outputs, or what was lost, by name."""
        return self._live.failures

    def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        """Outputs as they come. Ends with the outcome and does not raise for it: see `outcome` and `result`."""
        return self._live.values()

    async def result(self) -> dict[str, Any]:
        """All outputs: outside any stream a value or ABSENT, inside one a list.

        Raises:
            RequestFailed: it failed, was cancelled or met its deadline; has `outcome`, `failures` and `partial`.
        """
        return await self._live.result()

    async def send(self, placeholder: str, value: Any) -> None:
        """Send the next frame of a streamed placeholder; waits until its readers keep up. Raises InvalidInput."""
        await self._live.push(placeholder, value)

    async def end(self, placeholder: str) -> None:
        """Say that a streamed placeholder has no more frames. Raises InvalidInput."""
        self._live.end(placeholder)

    async def cancel(self) -> bool:
        """End it as cancelled; False if it had ended. Everything it holds anywhere is freed."""
        done = self._live.cancel()
        self._live.node.flush()
        return done

    def timeline(self) -> list[Span]:
        """Its activations so far, if it was submitted with `timeline=True`; the order is that of their ends."""
        return list(self._live.spans)


class AsyncSession:
    """Requests that share an id and params. Requests of one session are independent of each other.

    Roles may keep something for a session (a conversation): `close()` it or `async with` it, and they let go of it.
    Requests of a `nameless` one belong to no session, as far as roles can see.
    """

    def __init__(
        self,
        gateway: Gateway,
        id: str | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        nameless: bool = False,
    ) -> None:
        self.id = id or secrets.token_hex(8)
        self._nameless = nameless
        self.params = dict(params or {})
        self._gateway = gateway

    def update(self, **params: Any) -> None:
        """Change params for requests submitted from now on; those under way keep their snapshot."""
        self.params.update(params)

    async def submit(
        self,
        *,
        deadline: float | None = None,
        params: Mapping[str, Any] | None = None,
        seed: int | None = None,
        timeline: bool = False,
        **inputs: Any,
    ) -> AsyncRequest:
        """Start a request. `inputs` by placeholder; `deadline` in seconds from now; `params` for this request only.

        Raises:
            InvalidInput, UnknownParameter: it can't be started as it is.
            Overloaded, NoReplica: not now.
        """
        live = self._gateway.submit(
            inputs,
            params={**self.params, **(params or {})},
            session=None if self._nameless else self.id,
            deadline_s=deadline,
            seed=seed,
            timeline=timeline,
        )
        return AsyncRequest(live)

    async def close(self) -> None:
        """Tell every replica that the session is over. Its requests under way go on."""
        self._gateway.end_session(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Request:
    """A request under way, from any thread. Iterate it for (output, value) as they come, or call `result()`."""

    def __init__(self, request: AsyncRequest, call: Caller) -> None:
        self._request = request
        self._call = call

    @property
    def id(self) -> str:
        """Unique among all gateways of a deployment."""
        return self._request.id

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None while it runs."""
        return self._request.outcome

    @property
    def failures(self) -> Mapping[str, Failure]:
        """The failed outputs, or what was lost, by name."""
        return self._request.failures

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Outputs as they come. Ends with the outcome and does not raise for it: see `outcome` and `result`."""
        values = self._request.__aiter__()

        async def step() -> tuple[str, Any] | None:
            return await anext(values, None)

        while (item := self._call(step())) is not None:
            yield item

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """As `AsyncRequest.result`; raises TimeoutError after `timeout` seconds, and the request runs on."""

        async def wait() -> dict[str, Any]:
            async with asyncio.timeout(timeout):
                return await self._request.result()

        return self._call(wait())

    def send(self, placeholder: str, value: Any) -> None:
        """Send the next frame of a streamed placeholder; blocks until its readers keep up. Raises InvalidInput."""
        self._call(self._request.send(placeholder, value))

    def end(self, placeholder: str) -> None:
        """Say that a streamed placeholder has no more frames. Raises InvalidInput."""
        self._call(self._request.end(placeholder))

    def cancel(self) -> bool:
        """End it as cancelled; False if it had ended."""
        return self._call(self._request.cancel())

    def timeline(self) -> list[Span]:
        """Its activations so far, if it was submitted with `timeline=True`."""
        return self._request.timeline()


class Session:
    """`AsyncSession` from any thread."""

    def __init__(self, session: AsyncSession, call: Caller) -> None:
        self._session = session
        self._call = call

    @property
    def id(self) -> str:
        """Names the session to balancers and roles."""
        return self._session.id

    def update(self, **params: Any) -> None:
        """Change params for requests submitted from now on; those under way keep their snapshot."""
        self._session.update(**params)

    def submit(
        self,
        *,
        deadline: float | None = None,
        params: Mapping[str, Any] | None = None,
        seed: int | None = None,
        timeline: bool = False,
        **inputs: Any,
    ) -> Request:
        """As `AsyncSession.submit`."""
        made = self._session.submit(deadline=deadline, params=params, seed=seed, timeline=timeline, **inputs)
        return Request(self._call(made), self._call)

    def close(self) -> None:
        """As `AsyncSession.close`."""
        self._call(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Caller:
    """Runs coroutines on a loop in another thread and waits for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or what it raised. On KeyboardInterrupt the work is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def soon(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop without waiting."""
        self._loop.call_soon_threadsafe(call)
