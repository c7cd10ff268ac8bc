"""The tcp driver: plain sockets, always there.

Each peer has a few streams (a thread and a kept connection each) that share one queue of chunks. A stream keeps `depth`
requests under way; a chunk counts when its checksum has been seen right. When a connection breaks, the chunks under
way go back into the queue and the job goes on from there. One lock guards all bookkeeping and is never held while bytes
move.
"""

import heapq
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from omni_flow.data.errors import DataError
from omni_flow.data.transfer.arenas import ArenaMap
from omni_flow.data.transfer.base import Access, ArenaId, Done, Driver, Endpoint, Job, JobId, Outcome, Progress
from omni_flow.data.transfer.chunks import Chunk, Chunks
from omni_flow.data.transfer.errors import AuthRefused, BadJob, Cancelled, DeadlineExceeded, TransferError
from omni_flow.data.transfer.tcp_parts import Peer, Task, TcpOptions, is_loopback
from omni_flow.data.transfer.tcp_server import TcpServer
from omni_flow.data.transfer.tcp_stream import Stream


class TcpDriver(Driver):
    """See `Driver`. `done` is called from stream threads and from `start`, `cancel` and `close`."""

    name = "tcp"

    def __init__(self, options: TcpOptions, done: Done) -> None:
        options.check()
        self.options = options
        self._done = done
        self._arenas = ArenaMap()
        self._boot = os.urandom(16)
        self._own_secret = b"" if options.key else os.urandom(32)
        secret = options.key or self._own_secret
        self._server = TcpServer(
            self._arenas,
            options.host,
            options.port,
            secret,
            self._boot,
            options.stall_s,
            options.connections,
        )
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._timer = threading.Condition(self._lock)
        self._tasks: dict[JobId, Task] = {}
        self._deadlines: list[tuple[float, JobId]] = []
        self._peers: dict[tuple[str, int, bytes], Peer] = {}
        self._in_flight = 0
        self._closed = False
        self._reaper = threading.Thread(target=self._reap, name="transfer-deadlines", daemon=True)
        self._reaper.start()

    def register_arena(self, arena: ArenaId, fd: int, size: int, access: Access) -> None:
        self._arenas.add(arena, fd, size, access)

    def endpoint(self) -> Endpoint:
        host = self.options.advertise or self.options.host
        return Endpoint(self.name, host, self._server.port, self._boot, self._own_secret)

    def start(self, job: Job) -> None:
        try:
            task = self._prepare(job)
        except TransferError as error:
            self._done(Outcome.failed(job.id, error))
            return
        with self._lock:
            key = (job.peer.host, job.peer.port, job.peer.boot)
            peer = self._peers.setdefault(key, task.peer)
            task.peer = peer
            self._tasks[job.id] = task
            peer.waiting.append(task)
            heapq.heappush(self._deadlines, (task.deadline, job.id))
            wanted = min(self.options.streams, -(-task.total // self.options.chunk_bytes))
            fresh = [Stream(self, peer) for _ in range(wanted - len(peer.streams))]
            peer.streams.update(fresh)
            self._changed.notify_all()
            self._timer.notify()
        for stream in fresh:
            stream.thread.start()

    def cancel(self, job: JobId) -> None:
        self._abort(job, lambda task: Cancelled(f"job {job} was cancelled at {task.done} of {task.total} bytes"))

    def progress(self, job: JobId) -> Progress | None:
        with self._lock:
            task = self._tasks.get(job)
            return Progress(task.done, task.total) if task else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = [stream for peer in self._peers.values() for stream in peer.streams]
            jobs = list(self._tasks)
            self._changed.notify_all()
            self._timer.notify()
        for job in jobs:
            self.cancel(job)
        for stream in streams:
            stream.thread.join()
        self._reaper.join()
        self._server.close()

    # Bookkeeping, called by the streams.

    def await_work(self, stream: Stream) -> bool:
        """Wait until the stream's peer has a chunk to move; False when the stream shall end, after `idle_s` without
        work or at `close`."""
        peer = stream.peer
        with self._lock:
            while not self._closed:
                if self._next(peer):
                    return True
                if not self._changed.wait(self.options.idle_s) and not peer.waiting:
                    break
            self._leave(stream)
            return False

    def take(self, stream: Stream) -> tuple[Task, Chunk] | None:
        """The next chunk for a stream, round about the peer's jobs; None when there is none that fits the bytes in
        flight."""
        peer = stream.peer
        with self._lock:
            task = self._next(peer)
            if task is None:
                return None
            chunk = task.chunks.pop()
            peer.waiting.rotate(-1)
            self._in_flight += chunk.nbytes
            task.under_way += 1
            task.holders[stream] += 1
            return task, chunk

    def _next(self, peer: Peer) -> Task | None:
        while peer.waiting:
            task = peer.waiting[0]
            chunk = task.chunks.peek()
            if chunk is None:
                peer.waiting.popleft()
                continue
            fits = not self._in_flight or self._in_flight + chunk.nbytes <= self.options.in_flight_bytes
            return task if fits else None
        return None

    def settle(self, stream: Stream, task: Task, chunk: Chunk, *, good: bool, error: DataError | None = None) -> None:
        """A chunk has ended: good, to be asked for again, or (with `error`) the end of its job."""
        with self._lock:
            self._in_flight -= chunk.nbytes
            task.under_way -= 1
            task.holders[stream] -= 1
            task.error = task.error or error
            if good:
                task.done += chunk.nbytes
            elif task.error is None:
                task.retries += 1
                task.chunks.give_back(chunk)
                if task not in task.peer.waiting:
                    task.peer.waiting.append(task)
            self._changed.notify_all()
            outcome = self._ended(task)
        if outcome:
            self._done(outcome)

    def fail_peer(self, peer: Peer, error: TransferError) -> None:
        """End all jobs of a peer that cannot be reached."""
        with self._lock:
            jobs = [id for id, task in self._tasks.items() if task.peer is peer]
        for job in jobs:
            self._abort(job, lambda _: error)

    def pause(self, stream: Stream, seconds: float) -> None:
        """Wait before the next attempt, shorter when something changes for good."""
        with self._lock:
            self._changed.wait_for(lambda: self._closed or not stream.peer.waiting, seconds)

    def _prepare(self, job: Job) -> Task:
        rows = job.rows()
        if job.peer.driver != self.name:
            raise BadJob(f"job {job.id}: endpoint of driver {job.peer.driver!r} given to {self.name!r}")
        if not self.options.key and not is_loopback(job.peer.host):
            raise AuthRefused(f"{job.peer.host} is not on the loopback; give both nodes a shared key to go there")
        arena = self._arenas.local(job.local, job.direction)
        arena.check_rows(rows[:, 0], rows[:, 2])
        with self._lock:
            if self._closed:
                raise Cancelled("the driver is closed")
            if job.id in self._tasks:
                raise BadJob(f"job {job.id} is running already")
        chunks = Chunks(rows, self.options.chunk_bytes)
        deadline = time.monotonic() + job.timeout_s
        return Task(job, arena, Peer(job.peer), chunks, int(np.sum(rows[:, 2])), deadline)

    def _abort(self, job: JobId, why: Callable[[Task], TransferError]) -> None:
        with self._lock:
            task = self._tasks.get(job)
            if task is None:
                return
            task.error = task.error or why(task)
            task.chunks.drop()
            for stream, count in task.holders.items():
                if count:
                    stream.kick()
            self._changed.notify_all()
            outcome = self._ended(task)
        if outcome:
            self._done(outcome)

    def _ended(self, task: Task) -> Outcome | None:
        """The outcome, once, when nothing of the task is under way and nothing is to come."""
        if task.under_way or task.job.id not in self._tasks:
            return None
        if task.error is None and task.done < task.total:
            return None
        del self._tasks[task.job.id]
        if task.error:
            task.chunks.drop()
            return Outcome.failed(task.job.id, task.error, task.done, task.retries)
        return Outcome(task.job.id, task.done, retries=task.retries)

    def _leave(self, stream: Stream) -> None:
        peer = stream.peer
        peer.streams.discard(stream)
        if not peer.streams:
            self._peers = {key: other for key, other in self._peers.items() if other is not peer}

    def _reap(self) -> None:
        """End jobs whose time is up."""
        while True:
            with self._lock:
                now = time.monotonic()
                while self._deadlines and self._deadlines[0][1] not in self._tasks:
                    heapq.heappop(self._deadlines)
                if self._closed:
                    return
                if not self._deadlines:
                    self._timer.wait()
                    continue
                due, job = self._deadlines[0]
                if due > now:
                    self._timer.wait(due - now)
                    continue
                heapq.heappop(self._deadlines)
            self._abort(
                job,
                lambda task: DeadlineExceeded(
                    f"job {task.job.id} had {task.job.timeout_s} s and moved {task.done} of {task.total} bytes"
                ),
            )
