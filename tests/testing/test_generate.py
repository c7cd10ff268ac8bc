"""The random graphs hold every construct, and the reference finds an answer for each."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings

from omni_flow.control.spec import Join
from omni_flow.testing.generate import Drawn, drawn_graphs, random_request
from omni_flow.testing.reference import interpret
from omni_flow.testing.standins import HashCut, Standins


def test_five_hundred_random_graphs_hold_every_construct() -> None:
    seen: Counter[str] = Counter()
    for seed in range(500):
        drawn = random_request(Random(seed))
        result = interpret(drawn.spec, drawn.inputs, drawn.params, Standins(drawn.spec, seed))
        seen[result.outcome] += 1
        seen.update(f"fact {fact.kind}" for fact in result.facts.values())
        seen.update("torn" for _, torn in result.ends.values() if torn)
        seen.update(f"depth {len(path)}" for _, path in result.runs)
        for interface in drawn.spec.interfaces:
            seen["loop"] += interface.max_iters is not None
            seen["or groups"] += len(interface.groups) > 1
            seen["race"] += interface.race
            seen["sink"] += not interface.outputs
            seen["on_error"] += interface.on_error == "absent"
            seen["retries"] += interface.retries > 0
            for slot in (slot for group in interface.groups for slot in group):
                seen[slot.join] += 1
                seen["several levels"] += slot.join not in (Join.PLAIN, Join.WINDOW) and slot.levels > 1
                seen["ordered"] += slot.ordered and slot.join is Join.PLAIN
                seen["ordered window"] += slot.ordered and slot.join is Join.WINDOW
                seen["policy"] += slot.policy is not None
                seen["left context"] += slot.left > 0
                seen["optional"] += slot.optional
    wanted = [
        *("done", "failed", "fact value", "fact absent", "fact failed", "torn", "depth 1", "depth 2", "depth 3"),
        *("loop", "or groups", "race", "sink", "on_error", "retries", "several levels", "ordered", "ordered window"),
        *("policy", "left context", "optional", *Join),
    ]
    assert {what for what in wanted if not seen[what]} == set()


def test_the_same_seed_draws_the_same_graph() -> None:
    assert random_request(Random(7)) == random_request(Random(7))


def test_stand_ins_are_a_function_of_inputs_and_seed() -> None:
    drawn = random_request(Random(3))
    first, second = (interpret(drawn.spec, drawn.inputs, {}, Standins(drawn.spec, 5)) for _ in range(2))
    assert first.facts == second.facts


@settings(max_examples=50, deadline=None)
@given(drawn_graphs())
def test_every_existing_path_has_one_fact(drawn: Drawn) -> None:
    result = interpret(drawn.spec, drawn.inputs, drawn.params, Standins(drawn.spec, 1))
    for (_, path), _fact in result.facts.items():
        for depth, (source, number) in enumerate(path):
            assert number < result.ends[source, path[:depth]][0]


def test_hash_cut_cuts_at_max_frames_at_the_latest() -> None:
    policy = HashCut(max_frames=2, modulus=10**9)
    assert policy.cut([1], 0, False) is None
    assert policy.cut([1, 2], 0, False) == 2
    assert policy.cut([1, 2, 3], 2, True) is None
