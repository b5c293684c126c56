"""What becomes of a group when members fail, are redundant, or bring no signal."""

from __future__ import annotations

import pytest

from resources.failures import FailureClass
from resources.rewards.base import Score
from resources.rollout.gate_events import (
    BatchRequested,
    Cancel,
    FirstSampled,
    ScoreArrived,
    TooManyLost,
    TrajectoryLost,
    VersionLoaded,
)
from tests.gate_driver import Driver, done, failed, family


def test_failed_members_are_retried_twice_then_the_short_group_is_used():
    """S3, S4: [1, 1, dead, 0] is used as [1, 1, 0]; the failures are counted by class."""
    driver = Driver({"a": family(1, size=4)}, max_staleness=0)
    starts = driver.take_starts()
    for start, reward in zip([starts[0], starts[1], starts[3]], [1.0, 1.0, 0.0], strict=True):
        driver(done(start, reward))
    dead = starts[2]
    for attempt in range(3):
        assert dead.attempt == attempt
        driver(failed(dead))
        if attempt < 2:
            (dead,) = driver.take_starts()
            assert dead.is_retry
    driver(BatchRequested(0))
    (group,) = driver.batches[0].groups
    assert [member.reward for member in group.members] == [1.0, 1.0, 0.0]
    counts = {key.removesuffix("/a"): value for key, value in driver.batches[0].counters.items()}
    assert counts["failed.environment"] == 3 and counts["retried"] == 2 and counts["short_groups"] == 1


def test_policy_failures_are_scored_and_never_retried():
    """S4: a timeout that the policy caused stays 0."""
    driver = Driver({"a": family(1)}, max_staleness=0)
    starts = driver.take_starts()
    driver(done(starts[0], 0.0, failure=FailureClass.POLICY, failure_message="too long"))
    driver(done(starts[1], 1.0))
    driver(BatchRequested(0))
    assert [member.reward for member in driver.batches[0].groups[0].members] == [0.0, 1.0]


@pytest.mark.parametrize("policy", ["fail_fast", "retry"])
def test_a_group_that_cannot_be_full_is_dropped_and_issued_again(policy):
    driver = Driver({"a": family(1, size=3)}, max_staleness=0, member_failure=policy, max_member_retries=1)
    starts = driver.take_starts()
    driver(done(starts[0]))
    driver(failed(starts[1]))
    if policy == "retry":
        (again,) = driver.take_starts()
        driver(failed(again))
    assert Cancel(starts[2].trajectory_id, "preempted") in driver.cancels
    assert [(s.group_id, s.member) for s in driver.starts] == [("a-000000", 0), ("a-000000", 1), ("a-000000", 2)]
    assert driver.gate.families["a"].counts["failed_groups"] == 1


def test_below_the_minimum_the_group_is_dropped_at_once():
    driver = Driver({"a": family(1, size=2)}, max_staleness=0, max_member_retries=0)
    first, second = driver.take_starts()
    driver(failed(first))
    assert driver.cancels == [Cancel(second.trajectory_id, "preempted")]


def test_redundant_members_the_first_scored_win():
    driver = Driver({"a": family(1, size=2, redundant_members=2)}, max_staleness=0)
    starts = driver.take_starts()
    assert len(starts) == 4
    driver(done(starts[3], 1.0))
    driver(done(starts[0], None))  # its verdict is still out
    driver(done(starts[2], 0.5))
    assert driver.cancels == [Cancel(starts[1].trajectory_id, "cancelled_redundant")]
    cancelled = dict(ref=None, awaits_score=False, failure=FailureClass.CANCELLED, num_turns=7, num_tokens=70)
    driver(done(starts[1], 0.25, **cancelled))
    driver(ScoreArrived(Score(starts[0].trajectory_id, "s", "1", 1.0)))
    driver(BatchRequested(0))
    assert [m.reward for m in driver.batches[0].groups[0].members] == [0.5, 1.0]
    counts = {key.removesuffix("/a"): value for key, value in driver.batches[0].counters.items()}
    assert counts["cancelled_redundant.trajectories"] == 2
    assert counts["cancelled_redundant.tokens"] == 80
    assert counts["cancelled_redundant.length.7"] == 1 and counts["cancelled_redundant.reward_milli"] == 250
    assert driver.gate.num_ignored == 1, "the late score of the cancelled one"


def test_redundant_groups_are_cancelled_when_the_wanted_ones_are_scored():
    driver = Driver({"a": family(2, redundant_groups=1)}, max_staleness=0)
    starts = driver.take_starts()
    assert len({s.group_id for s in starts}) == 3
    for start in starts:
        if start.group_id != "a-000001":
            driver(done(start))
    assert {c.trajectory_id for c in driver.cancels} == {
        s.trajectory_id for s in starts if s.group_id == "a-000001"
    } and not driver.starts
    driver(BatchRequested(0))
    assert [g.group_id for g in driver.batches[0].groups] == ["a-000000", "a-000002"]


def test_lost_trajectories_are_dispatched_again():
    driver = Driver({"a": family(1)}, max_staleness=0)
    first, _ = driver.take_starts()
    driver(TrajectoryLost(first.trajectory_id, "worker lost"))
    (again,) = driver.starts
    assert again.trajectory_id == "run/a-000000/0/1"
    assert driver.gate.families["a"].counts["failed.infrastructure"] == 1


def test_dead_groups_stay_in_the_batch_by_default():
    driver = Driver({"a": family(2)}, max_staleness=0)
    driver.play_all(0, rewards=(1.0,))
    driver(BatchRequested(0))
    assert driver.batches[0].counters["num_dead_groups/a"] == 2


def test_dynamic_sampling_replaces_dead_groups_up_to_a_bound():
    """S5: the batch is full when one group in ten has signal; without any, a clear end."""
    driver = Driver({"a": family(1)}, max_staleness=0, dynamic_sampling=True, max_replaced_groups=9)
    for number in range(10):
        starts = driver.take_starts()
        for start in starts:
            driver(done(start, float(start.member) if number == 9 else 0.0))
    assert not driver.lost
    driver(BatchRequested(0))
    assert [g.group_id for g in driver.batches[0].groups] == ["a-000009"]
    driver(VersionLoaded(1))
    for _ in range(10):
        for start in driver.take_starts():
            driver(done(start, 0.0, 1))
    assert driver.lost == [TooManyLost("a", "dead", 10)]


@pytest.mark.parametrize(
    ("setting", "cause", "event"), [("max_failed_groups", "failed", failed), ("max_stale_groups", "stale", None)]
)
def test_failed_and_stale_groups_have_limits_of_their_own(setting, cause, event):
    """An outage waits by default; with a limit, it ends the run with its cause. Dead groups count elsewhere."""
    for limit, lost in ((None, []), (2, [TooManyLost("a", cause, 3)])):
        driver = Driver(
            {"a": family(1, size=1)}, max_staleness=0, max_member_retries=0, max_reissues=5, **{setting: limit}
        )
        for version in range(3):
            (start,) = driver.take_starts()
            if cause == "failed":
                driver(failed(start))
            else:
                driver(FirstSampled(start.trajectory_id, version))
                driver(VersionLoaded(version + 1))
        assert driver.lost == lost
        counts = driver.gate.families["a"].counts
        assert (counts["failed_groups"], counts["evicted_groups"]) == ((3, 0) if cause == "failed" else (0, 3))
        assert counts["dead_groups"] == 0


def test_limits_count_for_one_batch():
    driver = Driver({"a": family(1, size=1)}, max_staleness=0, max_member_retries=0, max_failed_groups=1)
    for version in range(3):
        (start,) = driver.take_starts()
        driver(failed(start))
        driver.play_all(version)
        driver(BatchRequested(version))
        driver(VersionLoaded(version + 1))
    assert not driver.lost
