"""Keeps every place of a deployment occupied: starts replicas, hears of deaths, starts the next with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence

from omni_flow.control.plan import Plan
from omni_flow.control.runtime.gateway import Gateway
from omni_flow.control.runtime.wire import Head, Retire
from omni_flow.deploy.errors import LaunchError, UnknownRole
from omni_flow.deploy.link import NurseryLink, how_ended
from omni_flow.deploy.membership import Membership
from omni_flow.deploy.messages import Exited, Setup, Signal, Start, Started, Word
from omni_flow.deploy.places import BACKOFF_S, DOWN, LEAVING, STARTING, Place, RoleStatus, role_state

log = logging.getLogger("omni_flow.supervisor")

SUSPECT_S = 0.5
"""How long after somebody lost a replica its process may still be found dead by itself, before it is ended."""

Notify = Callable[[str], None]
"""Told what happens, a line each, on the loop's thread."""


class Supervisor:
    """Places and their processes. All of it on the launcher's loop.

    `link` is its first nursery and `make_link` starts another; `new_address` names where a new incarnation listens.
    """

    def __init__(
        self,
        plan: Plan,
        link: NurseryLink,
        make_link: Callable[[], NurseryLink],
        new_address: Callable[[], str],
        on_event: Notify,
        *,
        backoff_s: Sequence[float] = BACKOFF_S,
        debug: bool = False,
    ) -> None:
        self._backoff = tuple(backoff_s)
        self._link = link
        self._make_link = make_link
        self._new_address = new_address
        self._notify = on_event
        self._debug = debug
        self.places: dict[str, Place] = {}
        self.membership = Membership(self)
        self._roles = {role.spec.name: role.id for role in plan.roles}
        self._closing = False
        self._epochs: dict[str, int] = {}
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._drains: dict[str, Callable[[], None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def attach(self, setup: Setup, gateway: Gateway) -> None:
        """Begin to work with the nursery, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._setup = setup
        self._gateway = gateway
        gateway.on_finished = self._request_finished
        self._use(self._link)

    def _use(self, link: NurseryLink) -> None:
        self._link = link
        link.attach(self._on_word, self._nursery_gone)
        link.order(self._setup)

    # ---- starting -------------------------------------------------------------------------------------------

    async def launch(self, counts: dict[str, int]) -> None:
        """Start `counts[role]` replicas of each role; return when all take requests.

        Raises: LaunchError as soon as one can't be loaded.
        """
        await self._link.ready()
        await self._add([(role, k) for role, count in counts.items() for k in range(count)])

    async def _add(self, wanted: list[tuple[str, int]]) -> None:
        added = []
        for role, k in wanted:
            name = f"{role}/{k}"
            first = self._epochs.pop(name, -1) + 1
            self.places[name] = Place(name, self._roles[role], role, self._backoff, first)
            self._waiters[name] = self._loop.create_future()
            added.append(self._waiters[name])
            self._start(name)
        try:
            await asyncio.gather(*added)
        finally:
            for role, k in wanted:
                name = f"{role}/{k}"
                waiter = self._waiters.pop(name)
                if waiter.done() and not waiter.cancelled() and waiter.exception() is not None:
                    self._forget(self.places[name])

    def _start(self, name: str) -> None:
        self._timers.pop(name, None)
        place = self.places[name]
        place.start()
        place.address = self._new_address()
        self._link.order(Start(name, place.epoch, place.role, place.address))

    def joined(self, id: str, pid: int, load_s: float) -> None:
        """A replica takes requests."""
        place = self._place(id)
        if place is None:
            return
        place.up(time.monotonic(), load_s)
        self._on_event(f"{id} is up (pid {pid}, loaded in {load_s:.2f} s)")
        waiter = self._waiters.get(place.name)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _place(self, id: str) -> Place | None:
        """The place whose present incarnation has that id."""
        place = self.places.get(id.rpartition("@")[0])
        return place if place is not None and place.id == id else None

    # ---- ends -----------------------------------------------------------------------------------------------

    def _on_word(self, word: Word) -> None:
        if isinstance(word, Started):
            place = self._place(f"{word.place}@{word.epoch}")
            if place is not None:
                place.pid = word.pid
                if place.state == LEAVING:
                    self._link.order(Signal(place.pid, signal.SIGTERM))
        elif isinstance(word, Exited):
            place = self._place(f"{word.place}@{word.epoch}")
            if place is not None:
                cause = word.cause or place.blame or how_ended(word.status)
                self._died(place, cause, word.trace)

    def _died(self, place: Place, cause: str, trace: str = "") -> None:
        id = place.id
        leaving = place.state == LEAVING
        wait = place.died(time.monotonic(), cause)
        self.membership.died(id, cause)
        self._unlink(place)
        if wait is None:
            self.membership.give_up(place.name)
        if leaving:
            self._removed(place)
            return
        if self._closing:
            return
        waiter = self._waiters.get(place.name)
        if waiter is not None and not waiter.done():
            place.state = DOWN
            waiter.set_exception(LaunchError({place.role_name: cause}, {place.role_name: trace}, debug=self._debug))
            return
        if wait is None:
            self._on_event(f"{id} died: {cause}; {place.name} is down after {len(self._backoff) + 1} quick deaths")
            log.error("%s is down: %s", place.name, cause)
            return
        self._on_event(f"{id} died: {cause}; it is started again{f' in {wait:g} s' if wait else ''}")
        log.warning("%s died: %s", id, cause)
        if wait:
            self._timers[place.name] = self._loop.call_later(wait, self._start, place.name)
        else:
            self._start(place.name)

    @staticmethod
    def _unlink(place: Place) -> None:
        """A killed process leaves the file of its socket."""
        scheme, _, path = place.address.partition("://")
        if scheme in ("unix", "ipc"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def suspected(self, id: str, cause: str) -> None:
        """Somebody lost a live replica: if its process does not end by itself, messages are lost and it must."""
        if not self._closing:
            self._loop.call_later(SUSPECT_S, self._end_suspect, id, cause)

    def _end_suspect(self, id: str, cause: str) -> None:
        place = self._place(id)
        if place is not None and place.pid and self.membership.address(id) is not None and not self._closing:
            place.blame = f"it was ended, for it could not be reached: {cause}"
            self._link.order(Signal(place.pid, signal.SIGKILL))

    def _nursery_gone(self, cause: str) -> None:
        """The nursery died, and its workers with it. Start another."""
        if self._closing:
            return
        log.error("%s", cause)
        try:
            self._use(self._make_link())
        except (OSError, LaunchError):
            log.exception("no nursery can be started")
            for place in self.places.values():
                place.state = DOWN
        for place in list(self.places.values()):
            if place.name not in self._timers:
                self._died(place, cause)

    # ---- fewer and more -------------------------------------------------------------------------------------

    async def scale(self, role: str, count: int, drain_s: float) -> None:
        """Have `count` replicas of a role: start some, or drain the last ones, for `drain_s` at most.

        Raises: UnknownRole, LaunchError.
        """
        if role not in self._roles:
            raise UnknownRole(role, list(self._roles))
        if count < 1:
            raise ValueError(f"role {role!r} needs at least one replica, not {count}")
        present = [p for p in self.places.values() if p.role_name == role and p.state != LEAVING]
        if count > len(present):
            taken = set(self.places)
            free = (k for k in range(len(taken) + count) if f"{role}/{k}" not in taken)
            await self._add([(role, next(free)) for _ in range(count - len(present))])
        elif count < len(present):
            await asyncio.gather(*(self._drain(place, drain_s) for place in present[count:]))

    async def _drain(self, place: Place, drain_s: float) -> None:
        gone = self._gone[place.name] = self._loop.create_future()
        was, place.state = place.state, LEAVING
        timer = self._timers.pop(place.name, None)
        if timer is not None or was == DOWN:  # it has no process
            if timer is not None:
                timer.cancel()
            self._removed(place)
            return
        if was == STARTING:
            if place.pid:
                self._link.order(Signal(place.pid, signal.SIGTERM))
            await gone
            return
        self.membership.leave([place.id])
        self._on_event(f"{place.id} is leaving")
        emptied: asyncio.Future[None] = self._loop.create_future()
        self._drains[place.id] = lambda: None if emptied.done() else emptied.set_result(None)
        self._request_finished(None)
        try:
            async with asyncio.timeout(drain_s):
                await emptied
                self._retire(place)
                await asyncio.shield(gone)
        except TimeoutError:
            cause = f"it left before its requests had ended: they took more than {drain_s:g} s"
            self.membership.died(place.id, cause)
            self._link.order(Signal(place.pid, signal.SIGTERM))
            await gone
        finally:
            self._drains.pop(place.id, None)

    def _retire(self, place: Place) -> None:
        address = self.membership.address(place.id)
        if address is not None:
            self.membership.node.post(address, Retire(True))

    def _request_finished(self, head: Head | None) -> None:
        """Requests may have named a replica that waits to be empty."""
        for id, emptied in list(self._drains.items()):
            live = self._gateway.live.values()
            if not any(id in hosts for request in live for hosts in request.info.replicas):
                emptied()

    def retired(self, id: str) -> None:
        """A replica has said its last; its process ends."""
        self._on_event(f"{id} retires")

    def ailing(self, id: str, cause: str) -> None:
        """A replica can't serve for now; with no cause, it can again."""
        place = self._place(id)
        if place is not None:
            place.ailing = cause
            self._on_event(f"{id} can't serve for now: {cause}" if cause else f"{id} can serve again")

    def _forget(self, place: Place) -> None:
        del self.places[place.name]
        self._epochs[place.name] = place.epoch

    def _removed(self, place: Place) -> None:
        self._forget(place)
        self.membership.give_up(place.name)
        gone = self._gone.pop(place.name, None)
        if gone is not None and not gone.done():
            gone.set_result(None)
        self._on_event(f"{place.name} is gone")

    def _on_event(self, line: str) -> None:
        try:
            self._notify(line)
        except Exception:  # the user's code must not stop supervision
            log.exception("on_event raised for %r", line)

    # ---- state ----------------------------------------------------------------------------------------------

    def status(self) -> dict[str, RoleStatus]:
        """Every role with its places."""
        found = {}
        for role in self._roles:
            replicas = [place.status() for place in self.places.values() if place.role_name == role]
            found[role] = RoleStatus(role, role_state([r.state for r in replicas]), replicas)
        return found

    async def close(self, grace_s: float) -> None:
        """End every worker and the nursery."""
        self._closing = True
        for timer in self._timers.values():
            timer.cancel()
        await self._link.stop(grace_s)
