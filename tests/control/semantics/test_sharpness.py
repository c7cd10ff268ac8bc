"""The comparison is sharp: each rule switched off alone, from out here, makes some random graph diverge.

`switches_core.py` and `switches_around.py` say how a rule is switched off. With nothing off the same graphs agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
import switches_around
import switches_core

from omni_flow.control import compile
from omni_flow.testing.generate import random_request
from omni_flow.testing.notation import parse_graph
from omni_flow.testing.schedule import Faults
from omni_flow.testing.simulate import Report, Request, simulate
from omni_flow.testing.standins import Functions, Standins

Patch = pytest.MonkeyPatch
TWO_WINDOWS = """
    p*
    A: p -> a
    B: p -> b
    V: window(a, 3, stride=1) -> v
    W: window(b, 2, stride=1, left=1) -> w
    out v = v
    out w = w
"""
TWO_WINDOWS_INPUTS = {"p": [1, 2, 3, 4, 5, 6]}
TWO_WINDOWS_ROLES = Functions(
    A=lambda p: [("a", p)] if p in (2, 3, 5, 6) else [],
    B=lambda p: [("b", p)] if p in (1, 4) else [],
    V=lambda a: [("v", a)],
    W=lambda b: [("w", b)],
)
GRAPHS = 1200
SCHEDULES = 4


def first_divergence(graphs: int) -> tuple[str, ...]:
    """What the comparison finds first among random graphs; empty if nothing."""
    report = Report("sharpness", 0)
    for seed in range(graphs):
        drawn = random_request(Random(seed))
        plan = compile.compile_spec(drawn.spec)
        request = Request(plan, drawn.spec, drawn.inputs, drawn.params, Standins(drawn.spec, seed))
        for number in range(SCHEDULES):
            request.run(seed * 100 + number, number, Faults(), report)
            if report.divergences:
                return report.divergences[0].what
    return ()


RULES: Sequence[Callable[[Patch], None]] = [
    switches_core.declared_order,
    switches_core.frames_in_order_of_joins,
    switches_core.count_waits_for_n,
    switches_core.lists_are_never_empty,
    switches_core.creators_send_ends_to_all_under_them,
    switches_core.route_by_slot,
    switches_core.tombstones_per_slot_prefix,
    switches_core.an_end_closes_no_bucket,
    switches_core.feedback_groups_apply_from_iteration_1,
    switches_core.dead_comes_before_failed,
    switches_core.a_group_of_absent_slots_is_dead,
    switches_core.a_failed_stream_ends_torn,
    switches_core.a_failure_is_no_absence,
    switches_core.the_tail_is_flushed_for_new_frames_only,
    switches_core.windows_count_present_frames,
    switches_core.ordered_runs_one_after_the_other,
    switches_core.ordered_fails_after_a_failed_one,
    switches_core.spool_rule,
    switches_core.credit_fills_windows,
    switches_core.bytes_fill_windows,
    switches_around.the_list_of_shares_is_pinned,
    switches_around.a_share_hosted_anew_starts_empty,
    switches_around.acks_are_kept,
    switches_core.early_acks_count,
    switches_around.what_was_sent_is_kept,
    switches_around.a_loss_is_told,
    switches_core.a_sink_is_awaited,
    switches_around.the_outcome_is_said_once,
    switches_around.a_closed_request_is_one_bit,
    switches_around.params_are_a_snapshot,
    switches_core.what_is_done_is_a_tombstone,
    switches_core.acks_close_numbers,
    switches_core.on_error_absent_forgives,
    switches_around.a_batch_that_raises_is_run_item_by_item,
    switches_around.a_batch_has_the_same_parameters,
    switches_around.a_closed_activation_leaves_its_batch,
]


@pytest.mark.parametrize("switch_off", RULES, ids=lambda rule: rule.__name__)
def test_without_the_rule_the_comparison_finds_a_divergence(
    switch_off: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    switch_off(monkeypatch)
    assert first_divergence(GRAPHS)


def test_without_the_sum_over_all_windows_of_a_stream_two_of_them_stall(monkeypatch: Patch) -> None:
    """The rule is needed so rarely that it gets the graph it was found with."""
    switches_core.credit_fills_several_windows(monkeypatch)
    report = simulate(
        parse_graph(TWO_WINDOWS),
        schedules=20,
        inputs=TWO_WINDOWS_INPUTS,
        roles=TWO_WINDOWS_ROLES,
        faults=Faults(credit=1),
    )
    assert report.outcomes["none"] > 0
