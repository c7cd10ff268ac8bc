"""When a dead replica is started again: the pure policy."""

from __future__ import annotations

import pytest

from omni_flow.deploy.places import BACKOFF_S, SETTLED_S, Place, role_state


def started() -> Place:
    place = Place("tts/0", 3, "tts")
    place.start()
    return place


def test_a_place_names_its_incarnations() -> None:
    place = started()
    assert (place.id, place.state) == ("tts/0@0", "starting")
    place.up(0.0, 1.5)
    assert (place.state, place.status().load_s) == ("up", 1.5)
    place.died(1.0, "killed")
    place.start()
    assert (place.id, place.status().restarts, place.status().cause) == ("tts/0@1", 1, "killed")


def test_quick_deaths_are_answered_later_and_later_and_then_no_more() -> None:
    place = started()
    waits = []
    for now in range(len(BACKOFF_S)):
        place.up(now, 0.0)
        waits.append(place.died(now + 0.5, "x"))
        place.start()
    assert waits == list(BACKOFF_S)
    assert place.died(100.0, "the last") is None
    assert (place.state, place.cause) == ("down", "the last")


def test_a_settled_replica_is_started_again_at_once() -> None:
    place = started()
    for now in range(3):
        place.died(now, "x")
        place.start()
    place.up(10.0, 0.0)
    assert place.died(10.0 + SETTLED_S, "y") == 0.0


def test_a_replica_that_loads_for_long_and_dies_has_not_settled() -> None:
    place = started()
    assert place.died(1000.0, "x") == 0.0
    place.start()
    assert place.died(2000.0, "x") == BACKOFF_S[1]


def test_a_leaving_replica_is_not_started_again() -> None:
    place = started()
    place.up(0.0, 0.0)
    place.state = "leaving"
    assert place.died(50.0, "it was asked to") is None
    assert place.state == "down"


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["up", "up"], "up"),
        (["up", "leaving"], "up"),
        (["up", "starting"], "degraded"),
        (["up", "down"], "degraded"),
        (["starting", "down"], "starting"),
        (["down"], "down"),
        (["leaving"], "down"),
        ([], "down"),
    ],
)
def test_the_state_of_a_role_is_that_of_its_places(states: list[str], state: str) -> None:
    assert role_state(states) == state
