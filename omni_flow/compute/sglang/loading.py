"""Bringing a request's cached pages from L2 and L3 into L1 while other requests run.

Fetches are posted on a connection of their own, because one is answered when its pages are there: its descriptor wakes
the scheduler, and no other thread has to, which would compete for the interpreter's lock with a scheduler that looks
for work without sleeping. What is brought is not pinned; the prefix cache finds and pins it like any other page. A
fetch that fails or comes late costs a hit, never a request.

The pages of a request are asked for in parts, each answered when it is there: while the last ones come, the first can
be pinned already.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omni_flow.data.errors import CallTimeout, DataError
from omni_flow.data.identity import PageHash
from omni_flow.data.kv_client import U8, bring_request, per_key
from omni_flow.data.messages import L1
from omni_flow.data.posting_client import Answer, PostingClient

log = logging.getLogger("omni_flow.compute")
AT_ONCE: Final = 2
"""Requests whose pages are fetched: the manager begins with the second when the first needs no more room. More would
have their pages pushed out again by those of others before they run."""
PART: Final = 128
"""Pages asked for at once."""
SILENCE_S: Final = 5.0
"""How long the manager may be late with its answer."""


Arrived = Callable[[int], None]
"""Told how many of the pages of a request, from the first on, have come or won't, while others are still under way."""


@dataclass(slots=True)
class _Order:
    request: Any
    keys: Sequence[PageHash]
    arrived: Arrived | None
    wanted: Callable[[], bool]
    answers: Sequence[Answer[U8]] = ()
    until: float = 0.0
    told: int = 0

    def tell(self) -> None:
        """Of parts that have come since; of the last, and those that came with it, `Loader.ready` does."""
        came = next((at for at, answer in enumerate(self.answers) if not answer.came), len(self.answers))
        if self.told < came < len(self.answers):
            self.told = came
            if self.arrived is not None:
                self.arrived(came * PART)


class Loader:
    """See the module. Belongs to the scheduler's thread; nothing here waits for the manager.

    Args:
        client: a connection of its own.
        timeout: seconds a fetch may take before the request goes on without it.
    """

    def __init__(self, client: PostingClient, pool: str, timeout: float = 10.0) -> None:
        self._client = client
        self._pool = pool
        self._timeout = timeout
        self._orders: deque[_Order] = deque()
        self._running: list[_Order] = []
        self._lost: DataError | None = None
        self.loaded_pages = 0

    def fileno(self) -> int:
        """Readable when a request may go on."""
        return self._client.link.fileno()

    @property
    def waiting(self) -> int:
        """How many requests wait for their pages; those whose pages come although nobody wants them any more, too."""
        return len(self._running) + sum(order.wanted() for order in self._orders)

    @property
    def requests(self) -> list[Any]:
        """Those that wait for their pages and are wanted."""
        return [order.request for order in (*self._running, *self._orders) if order.wanted()]

    def order(
        self,
        request: Any,
        keys: Sequence[PageHash],
        arrived: Arrived | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Bring these pages, then hand the request back. One that is not `wanted` any more when its turn comes was
        cancelled; nothing is brought for it."""
        self._orders.append(_Order(request, keys, arrived, wanted))
        if len(self._running) < AT_ONCE:
            self._begin()

    def hear(self) -> bool:
        """Take in what the manager has sent; whether there is a manager."""
        try:
            self._client.take_events()
        except DataError as error:
            self._lost = error
        return self._lost is None

    def ready(self) -> list[tuple[Any, bool]]:
        """Requests whose pages have come, or won't; whether all have."""
        if not self._running:
            return []
        self.hear()
        now, running, back = time.monotonic(), self._running, []
        self._running = []
        for order in running:
            if self._lost is None and order.until > now and not all(answer.came for answer in order.answers):
                self._running.append(order)
                order.tell()
            else:
                back.append((order.request, self._all_came(order)))
        while self._orders and len(self._running) < AT_ONCE:
            self._begin()
        return back

    def _begin(self) -> None:
        """Ask for the pages of the first request that waits. That there is no manager any more, `ready` finds."""
        order = self._orders.popleft()
        if not order.wanted():
            return
        order.answers = answers = []
        try:
            for start in range(0, len(order.keys), PART):
                fetch = bring_request("fetch", self._pool, order.keys[start : start + PART], "", L1, self._timeout)
                answers.append(self._client.post(fetch, per_key))
        except DataError as error:
            log.warning("cached pages can't be asked for: %s", error)
        order.until = time.monotonic() + self._timeout + SILENCE_S
        self._running.append(order)

    def _all_came(self, order: _Order) -> bool:
        whole = len(order.answers) * PART >= len(order.keys)
        try:
            for answer in order.answers:
                if not answer.came:
                    raise self._lost or CallTimeout("the memory manager does not answer")
                arrived = answer()
                self.loaded_pages += int(arrived.sum())
                whole = whole and bool(arrived.all())
        except DataError as error:
            log.warning("cached pages were not brought, they are computed again: %s", error)
            return False
        return whole
