"""The weight catalog as a service of the memory manager.

A segment is an anonymous memory file, or memory of a device that the manager makes without a CUDA context. The loader
of a grant alone may map it writable. Once a memory file is sealed the kernel refuses every writable mapping, so nobody,
the loader included, can change a byte that others read. A device knows no seals: there the manager hands out sealed
segments for reading only, and the mapping made of them refuses writes (shared by CUDA IPC it does not).
"""

import errno
import fcntl
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from omni_flow.data.device_arena import DeviceArena
from omni_flow.data.device_memory import Made, OwnedArena
from omni_flow.data.errors import BadArgument, BadToken, DataError, Holder, Refused, SystemRefusal
from omni_flow.data.messages import SHOWN_ROWS
from omni_flow.data.protocol import Message
from omni_flow.data.session import BaseService, Handler, Session
from omni_flow.data.weights import messages as m
from omni_flow.data.weights.catalog import Answer, Catalog, Grant, SegmentId, SessionId
from omni_flow.data.weights.errors import LoaderKeepsView, LoadingElsewhere
from omni_flow.data.weights.names import Family

if TYPE_CHECKING:
    from omni_flow.data.served_arenas import ArenaFile

log = logging.getLogger("omni_flow.data.weights")
_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PAGE_ENTRIES: Final = 200


class SegmentFile:
    """An unmapped memory file; mapping it here would forbid its sealing."""

    kind = "memfd"
    page_size = mmap.PAGESIZE

    def __init__(self, segment: SegmentId, nbytes: int) -> None:
        """Raises: SystemRefusal."""
        self.size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.fd = os.memfd_create(f"omni-weights-{segment}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SystemRefusal(
                f"no memory file for weights: {error}", "see the limits of the server process"
            ) from error
        try:
            os.ftruncate(self.fd, self.size)
        except OSError as error:
            os.close(self.fd)
            raise SystemRefusal(f"weights of {self.size} bytes: {error}", "load fewer tensors at once") from error

    def reader_fd(self) -> int:
        """A new descriptor through which the memory cannot be mapped writable."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def seal(self) -> None:
        """Raises: LoaderKeepsView while someone still has it mapped writable."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise LoaderKeepsView(
                "the weights just loaded are still mapped writable", "let the loader copy, or drop its views"
            ) from error

    def close(self) -> None:
        os.close(self.fd)


Segment = SegmentFile | DeviceArena | OwnedArena


@dataclass(slots=True)
class _Parked:
    session: Session
    message: Message
    ask: m.WeightAsk
    deadline: float


class WeightService(BaseService):
    """Args: `arenas`, the server's table of mappable names; `read_only`, its set of those that nobody may write;
    `on_device`, makes an arena of a name and size on a device and says so, now or later; `linger_s`, how long a segment
    outlives its last user; `clock`, monotonic seconds."""

    def __init__(
        self,
        arenas: "MutableMapping[str, Callable[[Session, str], ArenaFile | OwnedArena]]",
        read_only: set[str],
        on_device: Callable[[str, int, int, Made], None],
        linger_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._arenas = arenas
        self._read_only = read_only
        self._on_device = on_device
        self._clock = clock
        self._catalog = Catalog(linger_s)
        self._files: dict[SegmentId, Segment] = {}
        self._making: set[SegmentId] = set()
        self._loaders: dict[SegmentId, SessionId] = {}
        self._parked: deque[_Parked] = deque()
        self._sessions: dict[SessionId, Session] = {}
        self._subscribers: dict[Family, dict[SessionId, Session]] = {}
        self._retry = False

    @property
    def ops(self) -> Mapping[int, Handler]:
        return {
            m.W_GET: self._get,
            m.W_SEAL: self._seal,
            m.W_GIVE_UP: self._give_up,
            m.W_RELEASE: self._release,
            m.W_SWITCH: self._switch,
            m.W_SUBSCRIBE: self._subscribe,
            m.W_MANIFEST: self._manifest,
        }

    def opened(self, session: Session) -> None:
        self._sessions[SessionId(session.id)] = session

    def closed(self, session: Session) -> Iterator[None]:
        id = SessionId(session.id)
        self._sessions.pop(id, None)
        self._parked = deque(parked for parked in self._parked if parked.session is not session)
        for subscribers in self._subscribers.values():
            subscribers.pop(id, None)
        for gone in self._catalog.closed(id, self._clock()):
            if gone is not None:
                log.info("weight loader ended", extra={"session": id, "pid": session.pid, "segment": gone})
                self._drop(gone)
                self._retry = True
            yield

    def tick(self, now: float) -> float | None:
        for gone in self._catalog.expire(now):
            self._drop(gone)
            self._retry = True
        if self._retry:
            self._retry = False
            self._unpark()
        for parked in [parked for parked in self._parked if parked.deadline <= now]:
            self._parked.remove(parked)
            parked.session.fail(parked.message, self._too_late(parked))
        due = [parked.deadline for parked in self._parked]
        expiry = self._catalog.next_expiry()
        return min([*due, *([] if expiry is None else [expiry])], default=None)

    def stats(self) -> dict[str, int | float]:
        return {**self._catalog.stats(), "weight_waits": len(self._parked)}

    def held(self, session: Session) -> dict[str, Any]:
        """`weights`: of a session that holds or loads some, segments and their bytes."""
        segments, nbytes = self._catalog.held_by(SessionId(session.id))
        return {"weights": {"segments": segments, "bytes": nbytes}} if segments else {}

    def overview(self) -> dict[str, Any]:
        """`weights`: by model, version and device. The names of tensors are in the manifest."""
        return {"weights": self._catalog.overview()[:SHOWN_ROWS]}

    def check(self) -> list[str]:
        return self._catalog.check()

    def _get(self, session: Session, message: Message) -> None:
        ask = message.body(m.WeightAsk)
        if len(ask.specs) > m.MAX_SPECS:
            raise BadArgument(f"{len(ask.specs)} tensors in one message", f"at most {m.MAX_SPECS}")
        parked = _Parked(session, message, ask, self._clock() + ask.timeout_ms / 1000)
        if not self._serve(parked):
            if ask.timeout_ms <= 0:
                raise self._too_late(parked)
            self._parked.append(parked)

    def _serve(self, parked: _Parked) -> bool:
        """Answer an ask, unless it has to wait."""
        session, ask = parked.session, parked.ask
        may_load = not session.read_only
        if self._catalog.blocked(ask.family, ask.specs, ask.version, may_load=may_load, device=ask.device):
            return False
        id, now = SessionId(session.id), self._clock()
        answer = self._catalog.ask(id, ask.family, ask.specs, ask.version, now, ask.device)
        grant = answer.grant
        if grant is None:
            session.reply(parked.message, m.WeightAnswer(answer.version, tuple(answer.ready), None))
            return True
        self._making.add(grant.segment)
        try:
            if grant.device < 0:
                self._made(parked, answer, grant, SegmentFile(grant.segment, grant.nbytes))
            else:
                name = m.arena_name(grant.segment)
                self._on_device(name, grant.nbytes, grant.device, partial(self._made, parked, answer, grant))
        except BaseException:
            if grant.segment in self._making:
                self._take_back(answer, grant)
            raise
        return True

    def _made(self, parked: _Parked, answer: Answer, grant: Grant, made: Segment | DataError) -> None:
        """The memory of a grant is there, or can't be had."""
        if grant.segment not in self._making:
            if not isinstance(made, DataError):
                made.close()
            parked.session.fail(parked.message, BadToken(f"grant {grant.token} was given up", "ask again"))
            return
        if isinstance(made, DataError):
            self._take_back(answer, grant)
            parked.session.fail(parked.message, made)
            return
        self._making.discard(grant.segment)
        self._files[grant.segment] = made
        self._loaders[grant.segment] = grant.session
        self._arenas[m.arena_name(grant.segment)] = lambda asker, _: self._map(asker, grant.segment, made)
        sent = m.WeightGrant(grant.token, grant.segment, grant.nbytes, grant.specs, grant.offsets)
        try:
            parked.session.reply(parked.message, m.WeightAnswer(answer.version, tuple(answer.ready), sent))
        except DataError as error:  # too long for a message
            self._take_back(answer, grant)
            parked.session.fail(parked.message, error)

    def _take_back(self, answer: Answer, grant: Grant) -> None:
        """A grant ends that its session was not told of, and the session holds nothing of the answer."""
        self._drop(self._catalog.give_up(grant.session, grant.token))
        for segment in {entry.segment for entry in answer.ready}:
            self._catalog.release(grant.session, SegmentId(segment), self._clock())
        self._retry = True

    def _map(self, session: Session, segment: SegmentId, file: Segment) -> Segment:
        id = SessionId(session.id)
        if self._loaders.get(segment) != id and not self._catalog.holds(id, segment):
            raise Refused(f"segment {segment} is not held by this session", "get its tensors first")
        return file

    def _unpark(self) -> None:
        waiting, self._parked = self._parked, deque()
        for parked in waiting:
            try:
                if not self._serve(parked):
                    self._parked.append(parked)
            except DataError as error:
                parked.session.fail(parked.message, error)

    def _too_late(self, parked: _Parked) -> LoadingElsewhere:
        ask = parked.ask
        may_load = not parked.session.read_only
        loaders = self._catalog.blocked(ask.family, ask.specs, ask.version, may_load=may_load, device=ask.device)
        sessions = [self._sessions[id] for id in loaders if id in self._sessions]
        holders = tuple(Holder(s.id, s.pid, s.name, 0, 0) for s in sessions)
        who = ", ".join(str(s) for s in sessions) or "nobody"
        return LoadingElsewhere(
            f"tensors of {ask.family} were not there within {ask.timeout_ms} ms; loading: {who}",
            "wait longer, or end that process: the next in line then loads",
            holders,
        )

    def _seal(self, session: Session, message: Message) -> None:
        body = message.body(m.WeightSeal)
        id = SessionId(session.id)
        grant = self._catalog.grant_of(id, body.token)
        file = self._files.get(grant.segment)
        if file is None:
            raise BadToken(f"grant {body.token} has no memory yet", "wait for the answer")
        if isinstance(file, SegmentFile) and len(body.digests) == len(grant.specs):
            file.seal()
        entries = self._catalog.seal(id, body.token, body.digests, self._clock())
        if not isinstance(file, SegmentFile):
            self._read_only.add(m.arena_name(grant.segment))
        self._loaders.pop(grant.segment, None)
        self._retry = True
        session.reply(message, m.WeightSealed(tuple(entries)))

    def _give_up(self, session: Session, message: Message) -> None:
        body = message.body(m.WeightGiveUp)
        gone = self._catalog.give_up(SessionId(session.id), body.token)
        log.warning("weight loader gave up", extra={"session": session.id, "segment": gone, "reason": body.reason})
        self._drop(gone)
        self._retry = True
        session.reply(message)

    def _release(self, session: Session, message: Message) -> None:
        for segment in message.body(m.WeightRelease).segments:
            self._catalog.release(SessionId(session.id), SegmentId(segment), self._clock())
        session.reply(message)

    def _switch(self, session: Session, message: Message) -> None:
        body = message.body(m.WeightVersion)
        if session.read_only:
            raise Refused(f"session {session.id} is read-only", "switch weights from one that is not")
        old = self._catalog.switch(body.family, body.version)
        log.info("weights switched", extra={"family": str(body.family), "version": body.version, "old": old})
        for subscriber in self._subscribers.get(body.family, {}).values():
            subscriber.event(m.W_SWITCHED, body)
        session.reply(message, m.WeightVersion(body.family, old))

    def _subscribe(self, session: Session, message: Message) -> None:
        family = message.body(m.WeightFamily).family
        self._subscribers.setdefault(family, {})[SessionId(session.id)] = session
        session.reply(message, m.WeightVersion(family, self._catalog.current(family)))

    def _manifest(self, session: Session, message: Message) -> None:
        body = message.body(m.WeightManifest)
        version = self._catalog.current(body.family) if body.version is None else body.version
        entries = self._catalog.manifest(body.family, version)
        page = tuple(entries[max(body.start, 0) :][:_PAGE_ENTRIES])
        session.reply(message, m.WeightManifestPage(version, len(entries), page))

    def _drop(self, segment: SegmentId) -> None:
        """The segment is no more: its memory goes with the last mapping."""
        if segment in self._making:
            self._making.discard(segment)
            return
        self._loaders.pop(segment, None)
        del self._arenas[m.arena_name(segment)]
        self._read_only.discard(m.arena_name(segment))
        self._files.pop(segment).close()
