"""KV buffers over the arena of the memory manager, in place of memory that SGLang would allocate.

The arena is layer-major: all pages of the first plane, then of the next. A plane is one tensor of a layer (K and V are
two planes, an MLA latent is one); a page number is SGLang's page number, and page 0 is padding.
"""

from __future__ import annotations

from typing import Any

from omni_flow.compute.errors import ComputeError
from omni_flow.compute.sglang.takeover import current


def _planes(pool: Any, row_shapes: list[tuple[int, ...]]) -> list[Any]:
    """One tensor (slots, *row) per shape, one behind the other in the arena."""
    import math

    takeover = current()
    assert takeover.arena is not None
    pages = takeover.arena_pages or pool.size // pool.page_size + 1
    pool.size = (pages - 1) * pool.page_size
    slots = pages * pool.page_size
    item = pool.store_dtype.itemsize
    sizes = [slots * math.prod(shape) * item for shape in row_shapes]
    arena = takeover.arena(sum(sizes))
    if arena.numel() < sum(sizes):
        raise ComputeError(f"the KV arena has {arena.numel()} bytes, {sum(sizes)} are needed", "make the pool larger")
    out, at = [], 0
    for shape, size in zip(row_shapes, sizes, strict=True):
        out.append(arena[at : at + size].view(pool.store_dtype).view(slots, *shape))
        at += size
    return out


def mha_buffers(original: Any, pool: Any) -> None:
    """Hook around `MHATokenToKVPool._create_buffers_normal`."""
    if current().arena is None:
        original(pool)
        return
    keys, values = pool._kv_buffer_shapes()
    planes = _planes(pool, [keys[1:], values[1:]] * pool.layer_num)
    pool.k_buffer, pool.v_buffer = planes[0::2], planes[1::2]


def mla_buffers(original: Any, pool: Any) -> None:
    """Hook around `MLATokenToKVPool._create_buffers`."""
    if current().arena is None:
        original(pool)
        return
    pool.kv_buffer = _planes(pool, [(1, pool.kv_cache_dim)] * pool.layer_num)


def profile_bytes(original: Any, configurator: Any, before: Any) -> int:
    """Hook around `KVCacheConfigurator._profile_available_bytes`: the quota alone decides, the memory is elsewhere."""
    return 1 << 42
