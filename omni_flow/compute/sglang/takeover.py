"""What one engine process has taken over from SGLang: one object, made by the worker before SGLang starts.

SGLang calls hooks and factories without telling them whose they are; they find this object by `current()`. It is set
once per process and never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from omni_flow.compute.errors import ComputeError
from omni_flow.compute.prefix import MatchRule, anywhere
from omni_flow.compute.sglang.keeper import Keeper
from omni_flow.compute.sglang.loading import Loader
from omni_flow.compute.sglang.pages import PageBook
from omni_flow.data.identity import Namespace, PageHash


@dataclass(slots=True)
class Takeover:
    """The singleton of the plugin.

    Args:
        book: pages of this engine.
        page_size: tokens a page.
        namespace: identity of what this engine computes, without a tenant.
        arena: the manager's arena as a tensor of bytes; None: memory of this process.
        arena_pages: pages of the arena, padding page 0 included; 0: the quota and one.
        batch: the batch SGLang allocates for, see `allocator.remember_batch`.
        pool_page_bytes: bytes of a page of the manager's pool, which the model's must equal; 0: no pool.
        awake: seconds after its last work in which the scheduler does not sleep.
        rule: where the model lets a match end.
        loader: brings pages from lower tiers, where the pool has some.
        keeper: ties pages to sessions, where there is a pool.
        tail_graph: short extends run as rows of a captured decode step.
        weights: the weights shared with other engines (`shared_weights.SharedWeights`); None: of this engine alone.
        fixed: the fixed-row sessions (`fixed_rows.FixedRows`), once the scheduler is there.
        step_hook: `module:name` of what makes the step hook; "": there is none.
        steps: the step hook (`step_hook.Steps`), once the model is there.
    """

    book: PageBook
    page_size: int
    namespace: Namespace
    cpu: bool
    arena: Callable[[], Any] | None = None
    arena_pages: int = 0
    batch: Any = None
    awake: float = 0.0
    rule: MatchRule = anywhere
    step_hook: str = ""
    steps: Any = None
    fixed: Any = None
    loader: Loader | None = None
    keeper: Keeper | None = None
    weights: Any = None
    tail_graph: bool = False
    pool_page_bytes: int = 0
    counters: dict[str, int] = field(
        default_factory=lambda: {
            "hit_tokens": 0,
            "sealed": 0,
            "replaced": 0,
            "row_sizes": 0,
            "row_forwards": 0,
            "row_us": 0,
        }
    )
    _roots: dict[bytes, PageHash] = field(default_factory=dict)

    def root_of(self, tenant: bytes) -> PageHash:
        """Identity of the empty prefix of a tenant."""
        found = self._roots.get(tenant)
        if found is None:
            found = self._roots[tenant] = replace(self.namespace, tenant_salt=tenant).root()
        return found


_current: Takeover | None = None


def install(takeover: Takeover) -> None:
    """Make `takeover` the one of this process.

    Raises:
        ComputeError: there is one already.
    """
    global _current
    if _current is not None:
        raise ComputeError("this process has a take-over already", "start one engine per process")
    _current = takeover


def active() -> bool:
    """Whether this process is an engine of ours; the plugin does nothing in others."""
    return _current is not None


def current() -> Takeover:
    """The take-over of this process."""
    if _current is None:
        raise ComputeError("no take-over in this process", "start SGLang through omni_flow.compute.sglang.worker")
    return _current
