"""Timelines of requests."""

from __future__ import annotations

from omni_flow.compute.sglang.timeline import Timelines, durations


def test_only_who_asked_has_a_timeline_and_only_until_it_ends() -> None:
    timelines = Timelines()
    timelines.begin("a")
    timelines.mark("a", "named")
    timelines.mark("b", "named")
    assert [step for step, _ in timelines.end("a")] == ["received", "named"]
    timelines.mark("a", "probed")
    assert timelines.end("a") == []
    assert timelines.end("b") == []


def test_a_step_that_comes_again_counts_with_all_the_time_it_took() -> None:
    timeline = [("received", 0), ("chosen", 1_000_000), ("launched", 3_000_000), ("chosen", 3_500_000)]
    assert durations(timeline) == {"chosen": 1.5, "launched": 2.0}
