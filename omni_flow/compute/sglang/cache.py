"""SGLang's prefix cache, replaced: a mirror of what this engine has pinned; the rest of a chain is asked of the source.

A request's pages are `last_node.chain()` (sealed, shared, locked by it) followed by `own_pages(request)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from omni_flow.compute.prefix import PageChain, match_end
from omni_flow.compute.sglang.allocator import own_pages, to_device
from omni_flow.compute.sglang.takeover import Takeover, current
from omni_flow.data.identity import PageHash

BACKEND = "omni_flow"


def chain_of(request: Any) -> PageChain:
    """The chain of a request; one that came without gets the engine's own namespace."""
    chain: PageChain | None = request.__dict__.get("omni_chain")
    if chain is None:
        chain = request.__dict__["omni_chain"] = PageChain(current().root_of(b""))
    return chain


def make_cache(context: Any) -> Any:
    """Factory for SGLang's registry of prefix caches."""
    return _cache_class()(context.params)


@cache
def _cache_class() -> type:
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import (
        BasePrefixCache,
        DecLockRefResult,
        EvictResult,
        IncLockRefResult,
        MatchResult,
    )

    class OmniCache(BasePrefixCache):  # type: ignore[misc]
        """See the module."""

        def __init__(self, params: Any) -> None:
            self.disable = False
            self.page_size: int = params.page_size
            self.req_to_token_pool = params.req_to_token_pool
            self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
            self.device = torch.device(params.token_to_kv_pool_allocator.device)
            self.takeover: Takeover = current()
            self.book = self.takeover.book
            self.root_node = self.book.root
            self._in_page = torch.arange(self.page_size, device=self.device)

        def reset(self) -> None:
            self.book.reset()

        def _slots(self, pages: Sequence[int]) -> Any:
            if not pages:
                return torch.empty(0, dtype=torch.int64, device=self.device)
            column = to_device(np.asarray(pages, np.int64), self.device)[:, None]
            return (column * self.page_size + self._in_page).reshape(-1)

        def match_prefix(self, params: Any) -> Any:
            request = params.req
            if request is None:
                return MatchResult(self._slots(()), self.root_node, self.root_node, self.root_node)
            tokens = request.full_untruncated_fill_ids
            limit = request._compute_max_prefix_len(len(tokens))
            limit = len(tokens) if limit is None else min(limit, len(tokens))
            chain = chain_of(request)
            node = self.book.match(chain.upto(tokens, limit, self.page_size), self._known_absent(request))
            found = node.depth * self.page_size
            allowed = match_end(found, chain.media, self.page_size, self.takeover.rule)
            for _ in range((found - allowed) // self.page_size):
                assert node.parent is not None
                node = node.parent
            return MatchResult(self._slots(node.chain()), node, node, node)

        def _known_absent(self, request: Any) -> PageHash | None:
            """A page this request would ask the source for in vain. All that wait are looked up in one call, for each
            costs a round trip; what it says holds until the next forward."""
            if self.takeover.fixed is None:
                return None
            scheduler = self.takeover.fixed.scheduler
            now, waiting = scheduler.forward_ct, scheduler.waiting_queue
            seen: tuple[int, PageHash | None] = request.__dict__.get("omni_absent", (-1, None))
            if seen[0] == now or len(waiting) < 2:
                return seen[1] if seen[0] == now else None
            firsts: dict[int, PageHash] = {}
            for at, other in enumerate(waiting):
                ids = other.origin_input_ids
                first = self.book.first_unpinned(chain_of(other).upto(ids, len(ids) - 1, self.page_size))
                if first is not None:
                    firsts[at] = first
            absent = self.book.source.absent(list(dict.fromkeys(firsts.values())))
            for at, other in enumerate(waiting):
                first = firsts.get(at)
                other.omni_absent = (now, first if first in absent else None)
            seen = request.__dict__.get("omni_absent", (-1, None))
            return seen[1]

        def _seal(self, request: Any, tokens: Any, count: int, rewrite: bool) -> Any:
            """Publish the full pages of the first `count` tokens. Only called when the device has written them."""
            node = request.last_node
            keys = chain_of(request).upto(tokens, count, self.page_size)[node.depth :]
            if not keys:
                return node
            sealed = self.book.seal(node, keys, own_pages(request))
            self.takeover.counters["sealed"] += len(keys)
            self.takeover.counters["replaced"] += len(sealed.replaced)
            if rewrite and sealed.replaced:
                pairs = to_device(np.asarray(sealed.replaced, np.int64), self.device)
                columns = (pairs[:, :1] * self.page_size + self._in_page).reshape(-1)
                slots = (pairs[:, 1:] * self.page_size + self._in_page).reshape(-1)
                self.req_to_token_pool.req_to_token[request.req_pool_idx, columns] = slots.to(torch.int32)
            return sealed.node

        def seal_prefix(self, request: Any, tokens: Any, count: int) -> Any:
            """Publish the full pages of the first `count` tokens; returns the end of the sealed chain."""
            return self._seal(request, tokens, count, rewrite=False)

        def session_held_tokens(self, active_pool_idxs: Any = None) -> int:
            """Tokens held outside SGLang's requests: fixed rows."""
            fixed = self.takeover.fixed
            return 0 if fixed is None else fixed.held_pages * self.page_size

        def session_held_full_tokens(self, active_pool_idxs: Any = None) -> int:
            return self.session_held_tokens()

        def session_held_req_count(self, active_pool_idxs: Any = None) -> int:
            fixed = self.takeover.fixed
            return 0 if fixed is None else len(fixed.sessions)

        def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
            own = own_pages(req)
            if req.last_node is None:
                req.last_node = self.root_node
            if is_insert:
                self._seal(req, req.origin_input_ids + req.output_ids, kv_len_to_handle, rewrite=False)
            self.book.give(own)
            own.clear()
            self.book.unlock(req.last_node)

        def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
            tokens = req.get_fill_ids()
            if not chunked:
                # A middle chunk comes here when it was launched, not when it has run: nobody else may see it yet.
                node = self._seal(req, tokens, len(tokens), rewrite=True)
                self.book.lock(node)
                self.book.unlock(req.last_node)
                req.last_node = node
                req.cache_protected_len = node.depth * self.page_size
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(tokens)]
            req.prefix_indices = row.to(torch.int64, copy=True)

        def evict(self, params: Any) -> Any:
            pages = -(-params.num_tokens // self.page_size)
            return EvictResult(num_tokens_evicted=self.book.evict(pages) * self.page_size)

        def inc_lock_ref(self, node: Any) -> Any:
            self.book.lock(node)
            return IncLockRefResult(delta=0)

        def dec_lock_ref(self, node: Any, params: Any = None) -> Any:
            self.book.unlock(node)
            return DecLockRefResult(delta=0)

        def evictable_size(self) -> int:
            return self.book.idle * self.page_size

        def protected_size(self) -> int:
            return self.book.locked * self.page_size

        def total_size(self) -> int:
            return self.book.pinned * self.page_size

        def pretty_print(self) -> None:
            book = self.book
            print(f"held {book.held}, pinned {book.pinned}, idle {book.idle}, quota {book.source.quota}")

    return OmniCache
