"""SGLang's prefix cache, replaced: a mirror of what this engine has pinned; the rest of a chain is asked of the source.

A request's pages are `last_node.chain()` (sealed, shared, locked by it) followed by `own_pages(request)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import cache
from typing import Any

import numpy as np

from omni_flow.compute.prefix import PageChain, match_end
from omni_flow.compute.sglang.allocator import own_pages, to_device
from omni_flow.compute.sglang.lookahead import Lookahead
from omni_flow.compute.sglang.pages import Part, Sealed
from omni_flow.compute.sglang.takeover import Takeover, current
from omni_flow.data.identity import PageHash

BACKEND = "omni_flow"


def chain_of(request: Any) -> PageChain:
    """The chain of a request; one that came without gets the engine's own namespace."""
    chain: PageChain | None = request.__dict__.get("omni_chain")
    if chain is None:
        chain = request.__dict__["omni_chain"] = PageChain(current().root_of(b""))
    return chain


def written(request: Any) -> int:
    """Tokens of a request that ends whose KV the device has written. With overlap SGLang counts the last one as well,
    in which the step that nobody needs any more is still at work."""
    return len(request.origin_input_ids) + max(len(request.output_ids) - 1, 0)


def begin_sealing(_: Any, requests: Any, *__: Any, **___: Any) -> None:
    """Hook before SGLang gathers the results of a batch: the manager works meanwhile."""
    scheduler = current().fixed.scheduler
    scheduler.outlet.timelines.mark_all(requests, "computed")
    scheduler.tree_cache.post()


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
            self.lookahead = Lookahead(self.book, self.keys_of)
            self._in_page = torch.arange(self.page_size, device=self.device)
            self._later: list[tuple[Any, bool, Part]] = []
            self._answer: Callable[[], list[Sealed]] | None = None

        def reset(self) -> None:
            self.book.reset()

        def keys_of(self, request: Any) -> list[PageHash]:
            """Keys of the pages of a waiting request, as far as a match may go."""
            ids = request.origin_input_ids
            return chain_of(request).upto(ids, len(ids) - 1, self.page_size)

        def _slots(self, pages: Sequence[int]) -> Any:
            if not pages:
                return torch.empty(0, dtype=torch.int64, device=self.device)
            column = to_device(np.asarray(pages, np.int64), self.device)[:, None]
            return (column * self.page_size + self._in_page).reshape(-1)

        def match_prefix(self, params: Any) -> Any:
            request = params.req
            if request is None:
                return MatchResult(self._slots(()), self.root_node, self.root_node, self.root_node)
            self._mark(request, "chosen")
            tokens = request.full_untruncated_fill_ids
            limit = request._compute_max_prefix_len(len(tokens))
            limit = len(tokens) if limit is None else min(limit, len(tokens))
            chain = chain_of(request)
            node = self.book.match(chain.upto(tokens, limit, self.page_size), self._absent())
            found = node.depth * self.page_size
            allowed = match_end(found, chain.media, self.page_size, self.takeover.rule)
            for _ in range((found - allowed) // self.page_size):
                assert node.parent is not None
                node = node.parent
            slots = self._slots(node.chain())
            self._mark(request, "matched")
            return MatchResult(slots, node, node, node)

        def _mark(self, request: Any, step: str) -> None:
            fixed = self.takeover.fixed
            if fixed is not None:
                fixed.scheduler.outlet.timelines.mark(request.rid, step)

        def _absent(self) -> Set[PageHash]:
            fixed = self.takeover.fixed
            if fixed is None:
                return frozenset()
            return self.lookahead.absent(fixed.scheduler.waiting_queue, fixed.scheduler.forward_ct)

        def _seal_later(self, request: Any, tokens: Callable[[], Any], count: int, ends: bool) -> None:
            """The full pages of the first `count` tokens are to be sealed, which the device has written."""
            chain, node = chain_of(request), request.last_node
            pages = count // self.page_size
            keys = chain.keys[:pages] if pages <= len(chain.keys) else chain.upto(tokens(), count, self.page_size)
            self._later.append((request, ends, Part(node, keys[node.depth :], own_pages(request))))
            if ends:
                request.__dict__["omni_own"] = []

        def post(self) -> None:
            """Begin to seal what has gathered, all requests of a batch with one call."""
            if self._later and self._answer is None:
                self._answer = self.book.seal(*(part for *_, part in self._later))

        def settle(self) -> None:
            """Wait until what has gathered is sealed: before anybody hears of its tokens, and looks for its pages."""
            if not self._later:
                return
            self.post()
            assert self._answer is not None
            later, answer = self._later, self._answer
            self._later, self._answer = [], None
            for (request, ends, part), sealed in zip(later, answer(), strict=True):
                self.takeover.counters["sealed"] += len(part.keys)
                self.takeover.counters["replaced"] += len(sealed.replaced)
                if ends:
                    self.book.give(part.own)
                else:
                    self._go_on(request, sealed)
                self.book.unlock(part.node)

        def _go_on(self, request: Any, sealed: Sealed) -> None:
            self.book.lock(sealed.node)
            request.last_node = sealed.node
            request.cache_protected_len = sealed.node.depth * self.page_size
            if sealed.replaced:
                pairs = to_device(np.asarray(sealed.replaced, np.int64), self.device)
                columns = (pairs[:, :1] * self.page_size + self._in_page).reshape(-1)
                slots = (pairs[:, 1:] * self.page_size + self._in_page).reshape(-1)
                self.req_to_token_pool.req_to_token[request.req_pool_idx, columns] = slots.to(torch.int32)

        def seal_prefix(self, request: Any, tokens: Any, count: int) -> Any:
            """Publish the full pages of the first `count` tokens; returns the end of the sealed chain."""
            node = request.last_node
            keys = chain_of(request).upto(tokens, count, self.page_size)[node.depth :]
            (sealed,) = self.book.seal(Part(node, keys, own_pages(request)))()
            self.takeover.counters["sealed"] += len(keys)
            self.takeover.counters["replaced"] += len(sealed.replaced)
            return sealed.node

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
            if req.last_node is None:
                req.last_node = self.root_node
            if is_insert:
                count = min(kv_len_to_handle, written(req))
                self._seal_later(req, lambda: req.origin_input_ids + req.output_ids, count, ends=True)
                return
            own = own_pages(req)
            self.book.give(own)
            own.clear()
            self.book.unlock(req.last_node)

        def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
            if chunked:
                # A middle chunk comes here when it was launched, not when it has run: nobody else may see it yet.
                row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.extend_range.end]
                req.prefix_indices = row.to(torch.int64, copy=True)
            else:
                self._seal_later(req, req.get_fill_ids, req.extend_range.end, ends=False)

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
