"""Bodies of the ops of the session, the KV pages, the TempBuffers and the movers."""

from __future__ import annotations

from typing import Any, Final

import msgspec

L1: Final = 1
L2: Final = 2
L3: Final = 4
MAX_NAME: Final = 512
"""Longest name of a pool, of a session of callers, or of a peer."""
SHOWN_ROWS: Final = 50
SHOWN_TEXT: Final = 64
"""Most rows of a list, and characters of a name that clients make up, of what people are shown in one message."""
TIER_NAMES: Final = {L1: "l1", L2: "l2", L3: "l3"}


class Hello(msgspec.Struct, array_like=True):
    """First message of a connection.

    Args:
        role: `client`, `mover` or `viewer`.
        quotas: pages of L1 per pool that must always be available to this session.
        kinds: job kinds a mover executes.
        vector: `handshake.naming_vector` of the caller; empty for those who name no pages.
        pid, host: of the caller, believed only where the kernel does not tell (ZMQ) and only to notice its death.
    """

    role: str
    name: str
    read_only: bool = False
    quotas: dict[str, int] = {}
    kinds: tuple[str, ...] = ()
    pid: int = 0
    host: str = ""
    vector: bytes = b""


class PoolInfo(msgspec.Struct, array_like=True):
    name: str
    page_bytes: int
    l1_pages: int
    l2_pages: int
    l3: bool
    l1_device: int = -1
    planes: int = 1


class Welcome(msgspec.Struct, array_like=True):
    session: int
    epoch: int
    pools: tuple[PoolInfo, ...]
    arenas: tuple[str, ...]
    temp_bytes: int
    path: str
    secret: int
    node: str
    local: bool


class ArenaRef(msgspec.Struct, array_like=True):
    """Which arena: `<pool>/l1`, `<pool>/l2`, `temp`, `temp/slots`, `temp/ledger`."""

    name: str
    write: bool = False
    session: int = 0
    secret: int = 0


class ArenaInfo(msgspec.Struct, array_like=True):
    """What an arena is. Its descriptor comes with it, except for `cuda-ipc`.

    Args:
        kind: `memfd`, `cuda-vmm` or `cuda-ipc`.
        device: the GPU it lies on; -1: CPU memory.
        handle: of CUDA IPC, for `cuda-ipc`.
        readonly_enforced: whether a mapping made for reading can't be written.
    """

    name: str
    size: int
    kind: str
    page_size: int
    device: int = -1
    handle: bytes = b""
    readonly_enforced: bool = True


class Reserve(msgspec.Struct, array_like=True):
    pool: str
    count: int
    least: int = 0
    timeout_ms: int = 0
    tier: int = L1


class Reserved(msgspec.Struct, array_like=True):
    token: int
    forced: bool = False


class Commit(msgspec.Struct, array_like=True):
    pool: str
    token: int
    pin: bool = False
    keep_duplicates: bool = False


class Committed(msgspec.Struct, array_like=True):
    lease: int


class Abort(msgspec.Struct, array_like=True):
    pool: str
    token: int
    fence_ms: int = 0


class Group(msgspec.Struct, array_like=True):
    """One attention group of a look-up; its keys are the column of the same place.

    Args:
        window: 0 = every page of the prefix is needed, w = only its last w pages.
        stride: objects per page (head or layer ranges); the keys come page by page.
    """

    pool: str
    window: int = 0
    stride: int = 1


class Lookup(msgspec.Struct, array_like=True):
    groups: tuple[Group, ...]
    pin: bool = True
    tiers: int = L1 | L2
    prefetch: bool = False


class Found(msgspec.Struct, array_like=True):
    """`pages`: longest usable prefix; `lease`: 0 when nothing is pinned; `first`: first page pinned per group."""

    pages: int
    lease: int
    first: tuple[int, ...]


class Unpin(msgspec.Struct, array_like=True):
    pool: str
    lease: int


class PoolName(msgspec.Struct, array_like=True):
    pool: str


class Hint(msgspec.Struct, array_like=True):
    pool: str
    priority: int
    ttl: int = 0


class SessionKeep(msgspec.Struct, array_like=True):
    """A turn of a session ended with the pages of the key column, of `tokens` tokens each; keep them for `ttl` seconds.

    `chain`: which sequence of pages this is (the root of a namespace); the next turn on it takes its place.
    """

    pool: str
    session: str
    chain: bytes
    tokens: int
    ttl: float


class SessionEnd(msgspec.Struct, array_like=True):
    session: str


class SessionPages(msgspec.Struct, array_like=True):
    """What a session has in one pool: pages by tier, how many are kept, bytes and tokens a page."""

    pool: str
    page_bytes: int
    tokens: int
    kept: int
    l1: int
    l2: int
    l3: int


class SessionTiers(msgspec.Struct, array_like=True):
    pages: tuple[SessionPages, ...]


class TempLease(msgspec.Struct, array_like=True):
    size: int
    count: int
    timeout_ms: int = 0


class TempLeased(msgspec.Struct, array_like=True):
    size: int


class TempRetract(msgspec.Struct, array_like=True):
    slot: int
    generation: int
    shares: int = 1


class Job(msgspec.Struct, array_like=True):
    id: int
    kind: str
    pool: str
    page_bytes: int
    deadline_ms: int
    src: int = 0
    dst: int = 0
    peer: str = ""


class JobDone(msgspec.Struct, array_like=True):
    id: int
    error: str = ""


class JobAdd(msgspec.Struct, array_like=True):
    """Ask for pages to be brought somewhere; answered with one u8 per key when that has ended.

    Args:
        kind: `fetch` (from lower tiers into `tier`), `pull` (from `peer` into L2), `push` (to `peer`).
    """

    kind: str
    pool: str
    timeout_ms: int
    peer: str = ""
    tier: int = 1


class JobCancel(msgspec.Struct, array_like=True):
    id: int


class L3Change(msgspec.Struct, array_like=True):
    pool: str
    what: str


class TierState(msgspec.Struct, array_like=True):
    pool: str
    tier: int
    on: bool
    reason: str = ""


class SessionsAfter(msgspec.Struct, array_like=True):
    """Who is connected: the sessions with a number larger than this one, as many as a message takes."""

    session: int = 0


class Tree(msgspec.Struct, array_like=True):
    """A plain tree of numbers and names, for `STATS`, `INSPECT`, `OVERVIEW` and `CHECK`."""

    data: Any
