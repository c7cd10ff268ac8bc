"""KV buffers over the arena of the memory manager, in place of memory that SGLang would allocate.

A *plane* is one tensor of a layer: K and V of a layer are two planes, an MLA latent is one. Planes stand in the order
of `omni_flow.data.layout`: K of all layers, then V of all layers. A page number is SGLang's; page 0 is padding.

* On a GPU the arena is layer-major (plane, page, token), as SGLang's kernels address it.
* On a CPU it is page-major (page, plane, token): a page is one piece of bytes, the canonical one, so pages move between
  tiers and nodes as they are. Only `attention.py` addresses it, by rows: see `PagedRows`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_flow.compute.errors import ComputeError
from omni_flow.compute.sglang.takeover import current

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """A page-major arena as rows: one row is one token of one plane.

    Args:
        rows: (rows, heads, width).
        page_size: tokens a page.
        planes: planes a page.
    """

    rows: Tensor
    page_size: int
    planes: int

    def places(self, slots: Tensor) -> Tensor:
        """Rows of the first plane for these slots (page times page size plus token); plane p is p page sizes on."""
        return slots // self.page_size * (self.page_size * self.planes) + slots % self.page_size

    def get(self, places: Tensor, plane: int) -> Tensor:
        """A copy of rows of a plane, (tokens, heads, width)."""
        return self.rows.index_select(0, places + plane * self.page_size)

    def put(self, places: Tensor, plane: int, values: Tensor) -> None:
        """Write rows of a plane."""
        self.rows.index_copy_(0, places + plane * self.page_size, values.to(self.rows.dtype))

    def plane(self, number: int) -> Tensor:
        """A plane as (pages, page size, heads, width), no copy."""
        heads, width = self.rows.shape[1:]
        pages = self.rows.shape[0] // (self.page_size * self.planes)
        return self.rows.view(pages, self.planes, self.page_size, heads, width)[:, number]


def _arena(pool: Any, row_shape: tuple[int, ...], planes: int) -> tuple[Tensor, int]:
    """The bytes of the arena and its pages; sets the pool's size to what all engines share."""
    import torch

    takeover = current()
    pages = takeover.arena_pages or pool.size // pool.page_size + 1
    pool.size = (pages - 1) * pool.page_size
    needed = pages * pool.page_size * planes * math.prod(row_shape) * pool.store_dtype.itemsize
    if takeover.arena is None:
        return torch.zeros(needed, dtype=torch.uint8, device=pool.device), pages
    arena: Tensor = takeover.arena()
    if takeover.pool_page_bytes != needed // pages:
        raise ComputeError(
            f"the pool has pages of {takeover.pool_page_bytes} bytes, {pool.page_size} tokens of this model are "
            f"{needed // pages}",
            "make the pool with the model's page_bytes",
        )
    return arena[:needed], pages


def _planes(pool: Any, row_shape: tuple[int, ...], planes: int) -> list[Any]:
    """The planes of a pool, and on a CPU `pool.omni_rows`."""
    arena, pages = _arena(pool, row_shape, planes)
    typed = arena.view(pool.store_dtype)
    if current().cpu:
        pool.omni_rows = PagedRows(typed.view(-1, *row_shape), pool.page_size, planes)
        return [pool.omni_rows.plane(number) for number in range(planes)]
    return list(typed.view(planes, pages * pool.page_size, *row_shape))


def mha_buffers(pool: Any) -> None:
    """Replaces `MHATokenToKVPool._create_buffers_normal`."""
    keys, values = pool._kv_buffer_shapes()
    if keys[1:] != values[1:]:
        raise ComputeError(f"K has rows of {keys[1:]}, V of {values[1:]}", "such models have no pool yet")
    planes = _planes(pool, tuple(keys[1:]), 2 * pool.layer_num)
    pool.k_buffer, pool.v_buffer = planes[: pool.layer_num], planes[pool.layer_num :]


def mla_buffers(pool: Any) -> None:
    """Replaces `MLATokenToKVPool._create_buffers`."""
    pool.kv_buffer = _planes(pool, (1, pool.kv_cache_dim), pool.layer_num)


def profile_bytes(original: Any, configurator: Any, before: Any) -> int:
    """Hook around `KVCacheConfigurator._profile_available_bytes`: the quota alone decides, the memory is elsewhere."""
    return 1 << 42
