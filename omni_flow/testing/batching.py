"""Batches on the virtual clock. Who goes together, and what a call that raised comes to, is in `control/batches.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_flow.control.batches import Waiting, alike, answered
from omni_flow.control.host import Activation, RoleError
from omni_flow.testing.facts import Given
from omni_flow.testing.parties import BATCH, CALLED, Course, Seat

if TYPE_CHECKING:
    from omni_flow.testing.world import World

Member = tuple[Seat, Activation]
"""An activation, and where it runs."""
Place = tuple[str, int]
"""(replica, interface)."""


class Batches:
    """The batches of one request."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[Place, Waiting[Member]] = {}

    def add(self, seat: Seat, activation: Activation) -> None:
        """An activation waits for others of its interface on its replica."""
        world = self._world
        place = (world.hosts[seat.key], activation.interface.id)
        waiting = self._waiting.get(place)
        if waiting is None:
            waiting = self._waiting[place] = Waiting(world.schedule.batches[activation.interface.name])
            world.later(BATCH, ("batch", place), place, waiting)
        if waiting.add((seat, activation)):
            world.later(BATCH, ("batch", place), place, waiting)
            del self._waiting[place]

    def call(self, place: Place, waiting: Waiting[Member]) -> None:
        """A batch is full, or has waited long enough: its calls begin."""
        if self._waiting.get(place) is waiting:
            del self._waiting[place]
        for items in alike([(member, member[1].inputs) for member in waiting.take() if _runs(member)]):
            columns = {name: [inputs[name] for _, inputs in items] for name in items[0][1]}
            for row, ((_, activation), _) in enumerate(items):
                inputs = {name: column[row] for name, column in columns.items()}
                if inputs != activation.inputs:
                    called = f"{activation.interface.name} was called in a batch with {inputs}"
                    self._world.seen.contradictions.append(called)
            self._world.seen.batched += len(items) if len(items) > 1 else 0
            self._begin([member for member, _ in items])

    def _begin(self, members: Sequence[Member]) -> None:
        key = members[0][0].key
        self._world.later(CALLED, ("run", key), members, slow=self._world.is_slow(key))

    def called(self, members: Sequence[Member]) -> None:
        """A call returned or raised."""
        going = [member for member in members if _runs(member)]
        if not going:
            return
        courses: list[Course] = [activation.context for _, activation in going]
        raised = any(course.given.raises for course in courses)
        answer = answered(going, RuntimeError("raised") if raised else courses)
        for member, _ in answer.said:
            self._say(*member, failed=False)
        for member, _ in answer.raised:
            self._say(*member, failed=True)
        for again in answer.again:
            self._begin(again)

    def _say(self, seat: Seat, activation: Activation, failed: bool) -> None:
        """What role code gives in the activation, at once; one that raises has given something before."""
        outputs = [output.name for output in activation.interface.outputs]
        given: Given = activation.context.given
        for name, value in given.gives if given.raises or not failed else ():
            if name not in outputs:
                seat.share.fail(activation, f"unknown output {name!r}")
                return
            try:
                seat.share.give(activation, outputs.index(name), value, self._world.rng.randrange(10))
            except RoleError as error:
                seat.share.fail(activation, str(error))
                return
        if failed:
            seat.share.fail(activation, "raised")
        else:
            seat.share.finish(activation)


def _runs(member: Member) -> bool:
    seat, activation = member
    return not seat.dead and not activation.closed
