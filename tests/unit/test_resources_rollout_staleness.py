"""The staleness gate, event by event: eviction, what a batch holds, events that come late or twice."""

from __future__ import annotations

import pytest

from resources.failures import FailureClass
from resources.rewards.base import Score
from resources.rollout.gate_events import (
    BatchRequested,
    Cancel,
    FirstSampled,
    ScoreArrived,
    ScoreOverdue,
    TrajectoryLost,
    VersionLoaded,
)
from tests.gate_driver import Driver, done, family


def test_synchronous_trains_only_the_learners_version():
    """S1: max_staleness 0, at most one batch in flight, nothing starts between the batch and the load."""
    driver = Driver({"a": family(2)}, max_staleness=0)
    for version in range(4):
        assert len(driver.group_ids()) == 2
        driver.play_all(version)
        driver(BatchRequested(version))
        assert not driver.starts
        driver(VersionLoaded(version + 1))
    oldest = [[m.oldest_version for g in batch.groups for m in g.members] for batch in driver.batches]
    assert oldest == [[v] * 4 for v in range(4)]
    assert all(batch.counters["lag_max/a"] == 0 for batch in driver.batches)


def test_a_group_beyond_the_bound_is_evicted_whole_and_issued_again():
    driver = Driver({"a": family(1)}, max_staleness=1)
    first, second = driver.take_starts()[:2]
    driver(FirstSampled(first.trajectory_id, 0))
    driver(FirstSampled(second.trajectory_id, 0))
    driver(done(first, 1.0, 0))
    driver(VersionLoaded(1))
    assert not driver.cancels, "lag 1 is within the bound"
    driver.take_starts()
    driver(VersionLoaded(2))
    assert driver.cancels == [Cancel(second.trajectory_id, "evicted_stale")]
    again = [s for s in driver.starts if s.group_id == first.group_id]
    assert [(s.member, s.attempt, s.prompt_index) for s in again] == [(0, 1, 0), (1, 1, 0)]
    counts = driver.gate.families["a"].counts
    assert counts["evicted_groups"] == 1 and counts["evicted_lag.2"] == 1
    assert counts["evicted_stale.turns"] == 3 and counts["evicted_stale.length.3"] == 1
    driver(done(second, None, 0, ref=None, awaits_score=False, failure=FailureClass.CANCELLED, num_turns=5))
    assert counts["evicted_stale.trajectories"] == 2 and counts["evicted_stale.length.5"] == 1


def test_a_trajectory_that_has_not_sampled_yet_is_not_evicted():
    driver = Driver({"a": family(1)}, max_staleness=1)
    starts = driver.take_starts()
    driver(VersionLoaded(1))
    driver(VersionLoaded(2))
    assert not driver.cancels
    driver(FirstSampled(starts[0].trajectory_id, 0))
    assert Cancel(starts[0].trajectory_id, "evicted_stale") in driver.cancels, "late knowledge evicts as well"


def test_queued_groups_are_checked_at_every_load_and_when_the_batch_is_taken():
    """The bound holds at consumption: the learner may be ahead of what the engines serve."""
    driver = Driver({"a": family(1), "b": family(1)}, max_staleness=1)
    for start in driver.take_starts():
        if start.family == "a":
            driver(done(start, float(start.member), 0))
    assert len(driver.gate.families["a"].complete) == 2
    driver(VersionLoaded(1))
    assert len(driver.gate.families["a"].complete) == 2
    driver(VersionLoaded(2))
    assert len(driver.gate.families["a"].complete) == 0
    assert driver.gate.families["a"].counts["reissued_groups"] == 2


def test_second_check_when_the_batch_is_taken():
    driver = Driver({"a": family(1)}, max_staleness=1)
    driver.play_all(0)
    driver(BatchRequested(0))
    driver(BatchRequested(1))
    assert [batch.version for batch in driver.batches] == [0, 1], "lag 1 while the engines still serve version 0"
    driver(VersionLoaded(1))
    driver.play_all(0)  # one group, sampled before the engines switched
    assert len(driver.gate.families["a"].complete) == 1
    driver(BatchRequested(2))
    assert len(driver.batches) == 2 and not driver.gate.families["a"].complete, "lag 2 for batch 2"
    assert driver.gate.families["a"].counts["evicted_lag.2"] == 1


def test_reissues_are_bounded_then_the_prompt_is_dropped():
    driver = Driver({"a": family(1, size=1)}, max_staleness=0, max_reissues=2)
    for version in range(3):
        (start,) = [start for start in driver.take_starts() if start.prompt_index == 0]
        assert start.attempt == version
        driver(FirstSampled(start.trajectory_id, version))
        driver(VersionLoaded(version + 1))
    assert driver.gate.families["a"].counts["dropped_stale"] == 1
    assert [start.prompt_index for start in driver.starts] == [1], "a new prompt takes the freed place"


def test_finish_masked_keeps_what_is_beyond_the_bound():
    driver = Driver({"a": family(1)}, max_staleness=1, stale_policy="finish_masked")
    starts = driver.take_starts()
    for version in (1, 2, 3):
        driver(VersionLoaded(version))
    for start in starts[:2]:
        driver(done(start, 1.0, 0))
    driver(BatchRequested(3))
    assert driver.batches[0].counters["lag/a"] == {"3": 2}
    assert not driver.cancels


def test_batches_hold_exactly_their_groups_in_order_of_completion():
    """A group that finished early is never held up by an older one that has not."""
    driver = Driver({"a": family(2)}, max_staleness=1)
    starts = driver.take_starts()
    for group in ("a-000003", "a-000001", "a-000002"):
        for start in starts:
            if start.group_id == group:
                driver(done(start))
    driver(BatchRequested(0))
    assert [g.group_id for g in driver.batches[0].groups] == ["a-000003", "a-000001"]
    driver(BatchRequested(1))
    assert len(driver.batches) == 1 and driver.gate.missing() == {"a": 1}


def test_late_and_duplicate_events_change_nothing():
    """S26: ignored, exactly once."""
    driver = Driver({"a": family(1)}, max_staleness=0)
    first, second = driver.take_starts()
    driver(done(first, None))
    driver(ScoreOverdue(first.trajectory_id))
    (again,) = driver.take_starts()
    driver(ScoreArrived(Score(first.trajectory_id, "s", "1", 0.0)))
    driver(done(first, 0.0))
    driver(TrajectoryLost(first.trajectory_id))
    driver(done(again, 1.0))
    driver(done(again, 0.0))
    driver(done(second, 0.5))
    assert driver.gate.num_ignored == 4
    driver(BatchRequested(0))
    assert [m.reward for m in driver.batches[0].groups[0].members] == [1.0, 0.5]
    assert driver.gate.families["a"].counts["failed.reward"] == 1


def test_wrong_drivers_are_told():
    driver = Driver({"a": family()}, max_staleness=1)
    driver(VersionLoaded(1))
    with pytest.raises(ValueError, match="versions only grow"):
        driver(VersionLoaded(0))
    with pytest.raises(ValueError, match="batch 3 was asked for, but the next one is batch 1"):
        driver(BatchRequested(3))
