"""What the HTTP server can be told, with its defaults. One schema for the command line and for Python."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 2**20


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Limits of pictures and sound, looked at before anything is decoded; decoding happens in `workers` processes.

    `url_hosts`: from which hosts the server may fetch by URL (`example.org`, `*.example.org`); empty: from nowhere.
    """

    workers: int = 1
    max_bytes: int = 64 * MIB
    max_pixels: int = 40_000_000
    max_seconds: float = 600.0
    decode_s: float = 30.0
    memory_bytes: int = 4096 * MIB
    url_hosts: tuple[str, ...] = ()
    fetch_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and switches of a server. Seconds and bytes; None: no limit.

    `rate_per_s`, `burst`, `concurrency` are per API key (of all callers together where there are no keys), and what a
    key states itself goes before. `header_s`, `body_s`: how long a client may take to send them. `request_s`: the
    longest deadline a request may have, and the one it has if it says nothing. `drain_s`: how long requests under way
    may take to end when the server is told to stop. `timeline_per_s`: of how many requests a second every activation
    is noted, for the live graph and the metrics of interfaces.
    """

    max_body_bytes: int = 64 * MIB
    max_connections: int = 8192
    header_s: float = 10.0
    body_s: float = 60.0
    request_s: float = 600.0
    drain_s: float = 10.0
    rate_per_s: float | None = None
    burst: int = 32
    concurrency: int | None = None
    cors_origins: tuple[str, ...] = ()
    timeline_per_s: int = 20
    recent: int = 256
    session_idle_s: float = 3600.0
    max_sessions: int = 10_000
    media: MediaSettings = field(default_factory=MediaSettings)
