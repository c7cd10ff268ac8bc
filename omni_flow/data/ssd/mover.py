"""The SSD mover: a process that joins SSD tiers to the memory manager.

    python -m omni_flow.data.ssd.mover SOCKET DIRECTORY CAP [OPTIONS]       (--help names them)

It executes the manager's `store` and `load` jobs, one tier for each pool that has an L3, in a subdirectory of its
own. CAP is split evenly among the pools. Pages go between the L2 arena and the disk without a copy. What the tiers do
by themselves (recovery, reclaim, bad records, turning off and on) it reports to the manager.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server

from omni_flow.data.errors import run_process
from omni_flow.data.identity import ObjectRange, handshake_vector
from omni_flow.data.logs import log_to_stderr
from omni_flow.data.messages import L2, L3, Job, PoolInfo
from omni_flow.data.mover import U8, Columns, MoverLink, run_mover
from omni_flow.data.ssd.config import SsdConfig
from omni_flow.data.ssd.errors import BadSsdConfig, SsdError
from omni_flow.data.ssd.format import Kind
from omni_flow.data.ssd.io import Workers
from omni_flow.data.ssd.metrics import SsdCollector
from omni_flow.data.ssd.tier import SsdTier

log = logging.getLogger("omni_flow.data.ssd")
JOBS_AT_ONCE = 4


def namespace_of(pool: PoolInfo) -> int:
    """The id under which a pool's records are kept. Another page size or another scheme of identity makes
    them foreign.

    It only sorts records out early; what keeps tenants and models apart is the page hash, which covers both.
    """
    text = f"omni-flow ssd pool, {pool.page_bytes} bytes a page, {pool.name}".encode()
    return int.from_bytes(hashlib.sha256(text + handshake_vector()).digest()[:8], "little")


class SsdHandler:
    """Executes `store` and `load` for every pool with an L3.

    Args:
        directory: parent of the pools' directories.
        cap_bytes: most bytes on disk for all pools together.
        configure: makes a pool's configuration from its directory and cap.
    """

    def __init__(self, directory: Path, cap_bytes: int, configure: Callable[[Path, int], SsdConfig]) -> None:
        self._directory = directory
        self._cap = cap_bytes
        self._configure = configure
        self.tiers: dict[str, SsdTier] = {}
        self._kinds: dict[str, Kind] = {}
        self._pages: dict[str, U8] = {}
        self._workers = Workers(JOBS_AT_ONCE, "ssd-job")

    def start(self, link: MoverLink) -> None:
        """Opens and recovers the tiers, then turns L3 on."""
        self._link = link
        pools = [pool for pool in link.client.welcome.pools if pool.l3 and pool.l2_pages]
        if not pools:
            raise BadSsdConfig(
                "no pool has both an L2 and an L3", "give pools l2_pages and l3_pages, or run no SSD mover"
            )
        for pool in pools:
            path = self._directory / quote(pool.name, safe="")
            config = self._configure(path, self._cap // len(pools))
            self._kinds[pool.name] = Kind(namespace_of(pool), ObjectRange(0, 1))
            self._pages[pool.name] = link.pages(pool.name, L2)
            config = replace(
                config,
                largest=pool.page_bytes,
                namespaces=frozenset({self._kinds[pool.name].namespace}),
                on_change=partial(link.change, pool.name),
                on_state=partial(self._switched, pool.name),
            )
            self.tiers[pool.name] = SsdTier.open(config)
            self._announce(pool.name)

    def _announce(self, pool: str) -> None:
        """Names all records to the manager and turns its L3 on. In the main thread."""
        tier = self.tiers[pool]
        for keys, places in tier.records():
            self._link.change_now(pool, "recovered", keys, places, places)
        if tier.stats().on:
            self._link.tier_state(pool, L3, True)
        self._log(pool, "ssd tier on")

    def _switched(self, pool: str, on: bool, reason: str) -> None:
        if on:
            # While it was off the manager took failed loads for lost records.
            self._link.later(lambda: self._announce(pool))
        else:
            self._link.tier_state(pool, L3, False, reason)
            log.warning("ssd tier off", extra={"pool": pool, "reason": reason})

    def run(self, job: Job, columns: Columns) -> None:
        """Hands the job to a thread; it ends with `done` when no I/O touches its pages any more."""
        _, sources, targets, _, keys = columns
        if job.kind == "store":
            work = partial(self._store, job, sources, keys)
        else:
            work = partial(self._load, job, targets, keys)

        def run() -> None:
            try:
                work()
            except SsdError as error:
                self._link.done(job, np.zeros(len(keys), np.uint8), error=str(error))

        self._workers.submit(run)

    def _store(self, job: Job, slots: np.ndarray, keys: U8) -> None:
        pages = self._pages[job.pool]
        result = self.tiers[job.pool].put(self._kinds[job.pool], keys, [pages[slot] for slot in slots.tolist()])
        self._end(result.settled, lambda: self._link.done(job, result.stored.astype(np.uint8), result.places))

    def _load(self, job: Job, slots: np.ndarray, keys: U8) -> None:
        pages = self._pages[job.pool]
        result = self.tiers[job.pool].get(keys, [pages[slot] for slot in slots.tolist()])
        ok = (result.lengths == pages.shape[1]).astype(np.uint8)
        self._end(result.settled, lambda: self._link.done(job, ok))

    def _end(self, settled: threading.Event, report: Callable[[], None]) -> None:
        """Reports now, or as soon as a stalled I/O has let go of its pages: until then they belong to the kernel."""
        if settled.is_set():
            report()
            return

        def wait() -> None:
            settled.wait()
            report()

        threading.Thread(target=wait, name="ssd-stalled", daemon=True).start()

    def cancel(self, job_id: int) -> None:
        """Every I/O has a deadline of its own, so a job ends soon without being told."""

    def close(self) -> None:
        """Seals what is open, so that the next start reads footers only."""
        for pool, tier in self.tiers.items():
            tier.close()
            self._log(pool, "ssd tier closed")

    def _log(self, pool: str, event: str) -> None:
        stats = self.tiers[pool].stats()
        extra = {"pool": pool, "records": stats.records, "disk_bytes": stats.disk_bytes, "direct": stats.direct}
        log.info(event, extra=extra | {"epoch_of_tier": stats.epoch} | asdict(stats.counters))


def main(arguments: Sequence[str]) -> None:
    """Runs until the manager ends or SIGTERM."""
    parser = argparse.ArgumentParser(prog="omni_flow.data.ssd.mover")
    parser.add_argument("socket", help="path of the manager's socket")
    parser.add_argument("directory", type=Path, help="where the tiers lie; on a disk, for nothing else")
    parser.add_argument("cap", type=int, help="most bytes on disk")
    parser.add_argument(
        "--segment", type=int, default=0, help="bytes of a segment file; 0: a 32nd of a pool's cap, a page at least"
    )
    parser.add_argument("--threads", type=int, default=4, help="I/O threads a pool")
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds one I/O may take")
    parser.add_argument("--metrics-port", type=int, default=0, help="serve Prometheus metrics on this loopback port")
    given = parser.parse_args(arguments)
    log_to_stderr()
    # One descriptor a segment.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else soft, hard))

    def configure(path: Path, cap: int) -> SsdConfig:
        return SsdConfig(
            path=path,
            cap_bytes=cap,
            segment_bytes=given.segment,
            threads=given.threads,
            io_deadline_s=given.deadline,
        )

    def end(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    handler = SsdHandler(given.directory, given.cap, configure)
    if given.metrics_port:
        registry = CollectorRegistry()
        registry.register(SsdCollector(handler.tiers))
        start_http_server(given.metrics_port, "127.0.0.1", registry)
    try:
        run_mover(given.socket, "ssd mover", ("store", "load"), handler)
    except (SsdError, OSError) as error:
        log.error("ssd mover ends", extra={"directory": str(given.directory), "error": str(error)})
        raise SystemExit(1) from error
    finally:
        handler.close()


if __name__ == "__main__":
    run_process(lambda: main(sys.argv[1:]))
