"""Speed of the SSD tier against raw O_DIRECT of the same run, and the time of a restart.

    python bench/ssd.py [--json] [--dir DIR] [--threads 4] [--rounds 11] [--records 1000000] [--skip-restart]

Raw and tier alternate in short rounds on the same disk; the ratio is the median over rounds. Writes run with the byte
cap reached, so that every round reclaims as much as it writes; a share of the pages is read back between rounds and
therefore carried over. The user's bytes are counted, not the carried ones.
"""

import argparse
import json
import os
import platform
import random
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omni_flow.data.identity import ObjectRange
from omni_flow.data.ssd import Kind, SsdConfig, SsdTier, aligned_buffer

PAGE = 2 << 20
KIND = Kind(1, ObjectRange(0, 32, 0, 8))
now = time.perf_counter


def keys(start: int, count: int) -> np.ndarray:
    """Distinct 32-byte keys by number, spread like digests."""
    rng = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    salts = [np.uint64(salt * 0xD1B54A32D192ED03 % (1 << 64)) for salt in range(4)]
    return np.stack([rng ^ salt for salt in salts], axis=1).view(np.uint8)


def pages_of(buffer: memoryview, page: int) -> list[memoryview]:
    return [buffer[at : at + page] for at in range(0, len(buffer), page)]


def in_threads(count: int, work: Callable[[int, memoryview], None], buffers: Sequence[memoryview], jobs: int) -> float:
    """Seconds that `count` threads take for `jobs` calls work(job, buffer)."""
    todo = iter(range(jobs))
    lock = threading.Lock()

    def loop(own: Sequence[memoryview]) -> None:
        turn = 0
        while True:
            with lock:
                job = next(todo, None)
            if job is None:
                return
            work(job, own[turn % len(own)])
            turn += 1

    threads = [threading.Thread(target=loop, args=(buffers[i::count],)) for i in range(count)]
    start = now()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return now() - start


@contextmanager
def scratch(parent: str | None) -> Iterator[Path]:
    """A directory on a disk, deleted afterwards."""
    path = Path(tempfile.mkdtemp(prefix="omni-bench-ssd-", dir=parent or "/var/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def throughput(parent: str | None = None, threads: int = 4, rounds: int = 11) -> dict[str, float]:
    """Returns `ssd_write_ratio`, `ssd_read_ratio` and what they are made of."""
    round_pages, tier_pages, hot_pages = 192, 1024, 2
    buffer = aligned_buffer(round_pages * PAGE)
    np.frombuffer(buffer, np.uint8)[:] = np.random.default_rng(1).integers(0, 255, len(buffer), np.uint8)
    pages = pages_of(buffer, PAGE)
    randomness = random.Random(2)
    with scratch(parent) as where:
        fd = os.open(where / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, tier_pages * PAGE)
        config = SsdConfig(
            path=where / "tier", cap_bytes=tier_pages * PAGE, segment_bytes=128 << 20, threads=threads, io_deadline_s=30
        )
        with SsdTier.open(config) as tier:
            number = raw_at = 0

            def put() -> float:
                nonlocal number
                start = now()
                stored = tier.put(KIND, keys(number, round_pages), pages).stored
                took = now() - start
                assert stored.all(), tier.stats()
                number += round_pages
                return took

            def get(count: int) -> float:
                every = keys(0, number)
                alive = np.flatnonzero(tier.contains(every)).tolist()
                wanted = every[randomness.sample(alive, count)]
                start = now()
                lengths = tier.get(wanted, pages[:count]).lengths
                took = now() - start
                assert (lengths == PAGE).all(), tier.stats()
                return took

            def raw_write() -> float:
                nonlocal raw_at
                base, raw_at = raw_at, raw_at + round_pages
                return in_threads(
                    threads,
                    lambda job, b: void(os.pwritev(fd, [b], (base + job) % tier_pages * PAGE)),
                    pages,
                    round_pages,
                )

            def raw_read() -> float:
                places = randomness.sample(range(tier_pages), round_pages)
                return in_threads(
                    threads, lambda job, b: void(os.preadv(fd, [b], places[job] * PAGE)), pages, round_pages
                )

            def alternate(raw: Callable[[], float], ours: Callable[[], float]) -> list[Round]:
                done = []
                for turn in range(rounds):
                    get(hot_pages)
                    # What one side left to the background must not slow the other.
                    assert tier.wait_idle(60)
                    if turn % 2:
                        raw_side, our_side = timed(raw), timed(ours)
                    else:
                        our_side = timed(ours)
                        assert tier.wait_idle(60)
                        raw_side = timed(raw)
                    done.append(Round(raw_side, our_side))
                return done

            # Every block of both has been written before anything counts, and the tier is at its cap.
            for _ in range(tier_pages // round_pages + 1):
                raw_write()
            while tier.stats().counters.reclaimed_segments < tier.stats().segments:
                put()
            before = tier.stats().counters
            write = alternate(raw_write, put)
            after = tier.stats().counters
            read = alternate(raw_read, lambda: get(round_pages))
        os.close(fd)
    result: dict[str, float] = {}
    for name, sides in (("write", write), ("read", read)):
        ratios = [side.raw.seconds / side.ours.seconds for side in sides]
        result |= {
            f"ssd_{name}_ratio": statistics.median(ratios),
            f"ssd_{name}_ratio_min": min(ratios),
            f"ssd_{name}_ratio_max": max(ratios),
        }
        for side in ("raw", "ours"):
            took = [getattr(pair, side) for pair in sides]
            gigabytes = round_pages * PAGE / 1e9
            result[f"ssd_{name}_{side}_gb_per_s"] = gigabytes / statistics.median(t.seconds for t in took)
            result[f"ssd_{name}_{side}_cpu_us_per_page"] = statistics.median(t.cpu for t in took) / round_pages * 1e6
    user, moved = after.user_bytes - before.user_bytes, after.moved_bytes - before.moved_bytes
    result["ssd_write_amplification"] = (user + moved) / user
    result["ssd_reclaimed_segments"] = float(after.reclaimed_segments - before.reclaimed_segments)
    return result


@dataclass(frozen=True)
class Took:
    """Wall seconds of a round, and processor seconds of the whole process in it."""

    seconds: float
    cpu: float


@dataclass(frozen=True)
class Round:
    """The same work done raw and through the tier."""

    raw: Took
    ours: Took


def timed(work: Callable[[], float]) -> Took:
    """Runs `work`, which returns its own seconds."""
    begun = cpu()
    seconds = work()
    return Took(seconds, cpu() - begun)


def cpu() -> float:
    """Seconds of both processors that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def void(_: object) -> None:
    """Drops a result."""


def restart(parent: str | None = None, records: int = 1_000_000, repeats: int = 3) -> dict[str, float]:
    """Returns `restart_s`: from opening the directory to serving, `records` of 4 KiB on disk, accounting checked."""
    page, batch = 4096, 4096
    buffer = aligned_buffer(batch * page)
    with scratch(parent) as where:
        cap = int(records * 2 * page * 1.1) + (1 << 30)
        config = SsdConfig(
            path=where / "tier", cap_bytes=cap, segment_bytes=256 << 20, max_records=records, io_deadline_s=30
        )
        with SsdTier.open(config) as tier:
            done = 0
            while done < records:
                count = min(batch, records - done)
                payloads = pages_of(buffer[: count * page], page)
                assert tier.put(KIND, keys(done, count), payloads).stored.all(), tier.stats()
                done += count
            before = tier.stats()
        took = []
        for _ in range(repeats):
            start = now()
            tier = SsdTier.open(config)
            took.append(now() - start)
            # first what is there, then what is accounted: spare segments are made meanwhile, and accounted beforehand
            on_disk = sum(os.stat(where / "tier" / name).st_blocks * 512 for name in os.listdir(where / "tier"))
            after = tier.stats()
            assert (after.records, after.payload_bytes) == (before.records, before.payload_bytes)
            assert (after.records, after.payload_bytes) == (records, records * page)
            assert on_disk <= after.disk_bytes <= cap, (on_disk, after)
            tier.close()
    return {
        "restart_s": statistics.median(took),
        "restart_s_min": min(took),
        "restart_s_max": max(took),
        "restart_records": float(records),
        "restart_bytes_per_record": after.memory_bytes / records,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object of numbers on stdout and nothing else")
    parser.add_argument("--dir", help="parent of the directory that is used and deleted; default /var/tmp")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--skip-restart", action="store_true")
    given = parser.parse_args(arguments)
    result = throughput(given.dir, given.threads, given.rounds)
    if not given.skip_restart:
        result |= restart(given.dir, given.records)
    if given.json:
        print(json.dumps(result))
        return 0
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, numpy {np.__version__}")
    for name, value in result.items():
        print(f"{name:28} {value:12.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
