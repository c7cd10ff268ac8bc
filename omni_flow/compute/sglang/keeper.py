"""The KV of sessions between their turns: the memory manager keeps it, for this engine tells it with which pages a turn
ended; and this engine lets go of its own pins on it when its time is over, or the session is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from omni_flow.compute.prefix import PageChain
from omni_flow.compute.sglang.pages import PageBook
from omni_flow.data.identity import PageHash
from omni_flow.data.kv_client import Request, end_session_request, keep_session_request
from omni_flow.data.posting_client import PostingClient

SLACK_S: Final = 2.0
"""How much longer than this engine's pins the manager keeps pages: an idle engine looks at its clock once a second."""


class _Turn(NamedTuple):
    keys: Sequence[PageHash]
    until: float


class Keeper:
    """See the module. Belongs to the scheduler's thread; nothing here waits for the manager.

    Args:
        ttl: seconds that pages are kept after a turn.
    """

    def __init__(self, book: PageBook, client: PostingClient, pool: str, page_size: int, ttl: float) -> None:
        self._book = book
        self._client = client
        self._pool = pool
        self._page_size = page_size
        self._ttl = ttl
        self._turns: OrderedDict[tuple[str, PageHash], _Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def turn_ended(self, session: str, chain: PageChain, now: float) -> None:
        """A turn of a session ended with the pages of this chain."""
        name = (session, chain.root)
        self._turns[name] = _Turn(chain.keys, now + self._ttl)
        self._turns.move_to_end(name)
        request = keep_session_request(
            self._pool, session, chain.root, chain.keys, self._page_size, self._ttl + SLACK_S
        )
        self._post(request)

    def expire(self, now: float) -> None:
        """Let go of what is older than its time. Cheap when there is nothing to do."""
        while self._turns:
            name = next(iter(self._turns))
            turn = self._turns[name]
            if turn.until > now:
                return
            del self._turns[name]
            self._book.let_go(turn.keys)

    def end(self, session: str) -> None:
        """The session is over: what no other session has of its pages is dropped."""
        for name in [name for name in self._turns if name[0] == session]:
            self._book.let_go(self._turns.pop(name).keys)
        self._post(end_session_request(session))

    def _post(self, request: Request) -> None:
        # an order that fails costs hits, never a request: its answer is taken, and not looked at
        self._client.post(request, lambda reply: None)
