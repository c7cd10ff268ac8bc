"""A worker: the process of one replica. Forked by the nursery, it ends by itself only when it is of no use."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import uvloop

from omni_flow.control.plan import Plan
from omni_flow.control.runtime.node import Node
from omni_flow.control.runtime.replica import Replica
from omni_flow.control.runtime.values import Values
from omni_flow.control.runtime.wire import Ailing, BatchCodec, Record, Register, Retire, Retired
from omni_flow.control.transport import make_transport
from omni_flow.deploy import messages
from omni_flow.deploy.blame import Blame, blame
from omni_flow.deploy.messages import EXIT_BROKEN, EXIT_LOAD, EXIT_STALLED, EXIT_STUCK, Ending, Setup, Start
from omni_flow.deploy.tensors import ArenaTensors
from omni_flow.deploy.watchdog import Watchdog

CLOSE_S = 2.0
"""What a role's `close` gets before the process ends without it."""
AILS_S = 0.25
"""How often a role that may ail is asked whether it does."""


def run_worker(plan: Plan, setup: Setup, start: Start, report: int) -> int:
    """The whole life of a worker process. `report`: the pipe for its last words. The exit status."""
    logging.basicConfig(
        force=True,
        stream=sys.stderr,
        level=setup.log_level,
        format=f"%(asctime)s {start.id} %(levelname)s %(name)s: %(message)s",
    )
    worker = Worker(plan, setup, start, report)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(worker.live())  # the loop is not closed: that would wait for hanging threads
    except SystemExit as asked:
        worker.end(EXIT_BROKEN, f"role code ended its process: SystemExit({asked.code!r})", traceback.format_exc())
    except BaseException as error:
        worker.end(EXIT_BROKEN, f"{type(error).__name__}: {error}", traceback.format_exc())


class Worker:
    """One replica, its node and what ends them."""

    def __init__(self, plan: Plan, setup: Setup, start: Start, report: int) -> None:
        self._plan = plan
        self._setup = setup
        self._start = start
        self._report = report
        self._log = logging.getLogger("omni_flow.worker")
        self._ending: asyncio.Future[None]

    async def live(self) -> int:
        """Load the role, register, serve until asked to end. The exit status."""
        setup, start = self._setup, self._start
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        on_signal(loop, signal.SIGTERM, self._end_soon)
        tensors = PlacedTensors(setup.memory, start) if setup.memory else None
        node = self._node = Node(
            self._plan,
            make_transport(start.address, BatchCodec(tensors), key=setup.key),
            Values(tensors=tensors),
            credit=setup.credit,
            on_control=self._on_control,
            registry=setup.registry,
        )
        await node.start()
        role = self._plan.roles[start.role]
        replica = Replica(node, role, start.id, grace_s=setup.grace_s, on_stuck=self._on_stuck, data=tensors)
        begun = time.monotonic()
        load = asyncio.ensure_future(replica.load())
        await asyncio.wait((load, self._ending), return_when=asyncio.FIRST_COMPLETED)
        if not load.done():
            self.end(0, "ended while its role was loading")
        try:
            load.result()
        except Exception as error:
            found = blame(error)
            self._log.error("role %r could not be loaded: %s", role.spec.name, found)
            await node.close()
            self._say(found)
            return EXIT_LOAD
        watchdog = Watchdog(setup.stall_s, lambda cause, trace: self.end(EXIT_STALLED, cause, trace))
        record = Record(start.id, role.spec.name, node.address, socket.gethostname(), os.getpid())
        node.post(setup.registry, Register(record, time.monotonic() - begun))
        gc.collect()
        gc.freeze()  # the role's own objects are not looked at again and again; requests leave no cycles behind
        if replica.may_ail:
            self._ask_health(loop, replica, "")
        await self._ending
        watchdog.stop()
        await self._close(replica)
        await node.close()
        return 0

    def _ask_health(self, loop: asyncio.AbstractEventLoop, replica: Replica, before: str) -> None:
        if self._ending.done():  # a role that closes is not ill
            return
        cause = replica.ails()
        if cause != before:
            self._node.post(self._setup.registry, Ailing(self._start.id, cause))
        loop.call_later(AILS_S, self._ask_health, loop, replica, cause)

    async def _close(self, replica: Replica) -> None:
        try:
            await asyncio.wait_for(replica.close(), CLOSE_S)
        except TimeoutError:
            self._log.warning("the role's close took more than %g s and was given up", CLOSE_S)
        except Exception:
            self._log.exception("the role's close raised")

    # ---- what ends it ---------------------------------------------------------------------------------------

    def _on_control(self, sender: str, packet: Any) -> None:
        if not isinstance(packet, Retire):
            return
        if packet.drain and any(replica.parties for replica in self._node.replicas.values()):
            self._node.retiring = True
            self._node.retired = self._retired
        else:
            self._retired()

    def _retired(self) -> None:
        self._node.post(self._setup.registry, Retired(self._start.id))
        self._end_soon()

    def _end_soon(self) -> None:
        if not self._ending.done():
            self._ending.set_result(None)

    def _on_stuck(self, cause: str) -> None:
        stacks = "\n".join("".join(traceback.format_stack(frame)) for frame in sys._current_frames().values())
        self.end(EXIT_STUCK, cause, stacks)

    def end(self, status: int, cause: str, trace: str = "") -> NoReturn:
        """End the process at once, from any thread."""
        if status:
            self._log.error("%s\n%s", cause, trace)
        self._say(Blame(cause, "", trace))
        sys.stderr.flush()
        os._exit(status)

    def _say(self, found: Blame) -> None:
        ending = Ending(str(found)[:4000], found.trace[-8000:])
        os.write(self._report, messages.encode(ending))


class PlacedTensors(ArenaTensors):
    """As `ArenaTensors`; `address` is where the KV pools of this replica are."""

    def __init__(self, addresses: Sequence[str], start: Start) -> None:
        super().__init__(addresses[0], start.id)
        self._pools_at = addresses[int(start.place.rpartition("/")[2]) % len(addresses)]

    @property
    def address(self) -> str:
        return self._pools_at


def on_signal(loop: asyncio.AbstractEventLoop, signum: signal.Signals, call: Callable[[], None]) -> None:
    """Run `call` on the loop when a signal comes. Right also where uvloop, in a child forked from a thread, does not
    take its own thread for the main one and would not look at signals.
    """
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def woken() -> None:
        if signum in os.read(read, 4096):
            call()

    loop.add_reader(read, woken)
    signal.signal(signum, lambda _signum, _frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
