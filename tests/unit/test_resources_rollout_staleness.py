"""The staleness gate, event by event: admission, eviction, groups, batches, resume."""

from __future__ import annotations

import json

import pytest

from resources.environments.family import FamilyConfig
from resources.failures import FailureClass
from resources.rewards.base import Score
from resources.rollout.config import RolloutConfig
from resources.rollout.gate_events import (
    BatchRequested,
    Cancel,
    Decision,
    Event,
    FirstSampled,
    MemberDone,
    Opened,
    ScoreArrived,
    ScoreOverdue,
    Start,
    TakeBatch,
    TooManyLost,
    TrajectoryLost,
    VersionLoaded,
)
from resources.rollout.messages import TrajectoryDone
from resources.rollout.staleness import StalenessGate
from resources.trajectories.trajectory import TrajectoryRef


def family(groups: int = 2, size: int = 2, **changes) -> FamilyConfig:
    return FamilyConfig(
        environment="e", hardware_class="compute", groups_per_iteration=groups, group_size=size, **changes
    )


def done(start: Start, reward: float | None = 1.0, version: int | None = 0, **changes) -> MemberDone:
    fields = dict(
        trajectory_id=start.trajectory_id, family=start.family, group_id=start.group_id, member=start.member,
        attempt=start.attempt, ref=TrajectoryRef("f.arrow", start.member), reward=reward, awaits_score=reward is None,
        success=None, failure=None, failure_message="", termination="terminated", oldest_version=version,
        newest_version=version, num_sampled_tokens=4, num_tokens=10, num_turns=3, num_invalid_actions=0,
        truncated=False, duration_s=1.0,
    )  # fmt: skip
    return MemberDone(TrajectoryDone(**{**fields, **changes}))


def failed(start: Start, failure: FailureClass = FailureClass.ENVIRONMENT) -> MemberDone:
    return done(start, None, None, ref=None, awaits_score=False, failure=failure, failure_message="broken")


class Driver:
    """A gate with its decisions collected, every invariant checked after every event."""

    def __init__(self, families: dict[str, FamilyConfig], *, state=None, version=None, num_batches=None, **config):
        if config.get("max_staleness") == 0:
            config["pipeline"] = "synchronous"
        self.gate = StalenessGate("run", families, RolloutConfig(**config), num_batches=num_batches)
        if state is not None:
            self.gate.restore(state, version)
        self.starts: list[Start] = []
        self.cancels: list[Cancel] = []
        self.batches: list[TakeBatch] = []
        self.lost: list[TooManyLost] = []
        self(Opened())

    def __call__(self, event: Event) -> list[Decision]:
        decisions = self.gate.handle(event)
        self.gate.validate()
        for decision in decisions:
            match decision:
                case Start():
                    self.starts.append(decision)
                case Cancel():
                    self.cancels.append(decision)
                case TakeBatch():
                    self.batches.append(decision)
                case TooManyLost():
                    self.lost.append(decision)
        return decisions

    def take_starts(self) -> list[Start]:
        starts, self.starts = self.starts, []
        return starts

    def play_all(self, version: int, rewards=(1.0, 0.0)) -> None:
        """Finish everything started, member by member."""
        while self.starts:
            for start in self.take_starts():
                if start.trajectory_id in self.gate.seats:
                    self(done(start, rewards[start.member % len(rewards)], version))

    def group_ids(self) -> list[str]:
        return list(dict.fromkeys(start.group_id for start in self.starts))


def test_admission_is_bounded_per_family_in_groups():
    """start <= (max_staleness + version + 1) * groups - accepted - running; families take turns."""
    driver = Driver({"a": family(2), "b": family(3)}, max_staleness=1)
    assert driver.group_ids()[:4] == ["a-000000", "b-000000", "a-000001", "b-000001"]
    assert [g for g in driver.group_ids() if g.startswith("a")] == [f"a-{i:06d}" for i in range(4)]
    assert [g for g in driver.group_ids() if g.startswith("b")] == [f"b-{i:06d}" for i in range(6)]
    driver.play_all(0)
    assert driver.gate.admission.accepted("a") == 4 and driver.gate.admission.admissible("a") == 0
    driver(BatchRequested(0))
    assert not driver.starts, "taking a batch frees nothing: only a new version does"
    driver(VersionLoaded(1))
    assert len([g for g in driver.group_ids() if g.startswith("a")]) == 2


def test_nothing_is_started_that_no_batch_could_hold():
    """Three batches of two groups at alpha 1: six groups in all, however far the version moves."""
    driver = Driver({"f": family()}, max_staleness=1, num_batches=3)
    for version in range(3):
        for start in [s for s in driver.starts if s.trajectory_id in driver.gate.seats]:
            driver(done(start, float(start.member), version=version))
        driver(BatchRequested(version))
        driver(VersionLoaded(version + 1))
    assert len(driver.batches) == 3
    assert len({start.group_id for start in driver.starts}) == 6
    assert not driver.gate.seats


def test_a_service_that_only_evaluates_starts_no_training_group():
    driver = Driver({"f": family()}, state={"version": 7}, num_batches=7)
    assert not driver.starts


def test_admission_is_bounded_by_concurrency():
    driver = Driver({"a": family(4, max_concurrent_groups=3)}, max_staleness=1)
    assert len(driver.group_ids()) == 3
    for start in [s for s in driver.take_starts() if s.group_id == "a-000000"]:
        driver(done(start))
    assert driver.group_ids() == ["a-000003"]


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


def test_resume_starts_without_a_burst():
    """S12: version 100, batch 8, staleness 2: at most 24 groups start; accepted = version * groups + unconsumed."""
    driver = Driver({"a": family(8)}, state={"version": 100}, max_staleness=2)
    assert len(driver.group_ids()) == 24
    assert driver.group_ids()[0] == "a-000800", "the prompts of the trained batches are not issued again"
    driver.play_all(100)
    resumed = Driver({"a": family(8)}, state=json.loads(json.dumps(driver.gate.snapshot())), max_staleness=2)
    assert resumed.group_ids() == [] and resumed.gate.admission.accepted("a") == 824


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


def test_resume_keeps_scored_work_and_issues_the_rest_again_once():
    """S9: 12 groups with 96 members in flight or scored; after the resume each prompt is trained exactly once."""
    driver = Driver({"a": family(6, size=8)}, max_staleness=1)
    starts = driver.take_starts()
    assert len(starts) == 96
    for start in starts[:40]:  # five complete groups
        driver(done(start, float(start.member)))
    driver(done(starts[40], 1.0))
    driver(done(starts[41], None))
    state = json.loads(json.dumps(driver.gate.snapshot()))
    resumed = Driver({"a": family(6, size=8)}, state=state, max_staleness=1)
    again = resumed.take_starts()
    assert len(again) == 96 - 42
    assert all(start.attempt == 1 for start in again)
    resumed(ScoreArrived(Score(starts[41].trajectory_id, "s", "2", 0.0)))
    for start in again:
        resumed(done(start, float(start.member)))
    resumed(BatchRequested(0))
    resumed(BatchRequested(1))
    trained = [g.group_id for batch in resumed.batches for g in batch.groups]
    assert sorted(trained) == [f"a-{i:06d}" for i in range(12)]
    refs = [m.trajectory_id for batch in resumed.batches for g in batch.groups for m in g.members]
    assert len(set(refs)) == 96


@pytest.mark.parametrize("trained", [False, True])
def test_a_batch_taken_but_not_trained_is_neither_skipped_nor_trained_twice(trained):
    driver = Driver({"a": family(2)}, max_staleness=1)
    driver.play_all(0)
    driver(BatchRequested(0))
    state = json.loads(json.dumps(driver.gate.snapshot()))
    resumed = Driver({"a": family(2)}, state=state, version=1 if trained else 0, max_staleness=1)
    resumed(BatchRequested(1 if trained else 0))
    taken = [g.group_id for g in resumed.batches[0].groups]
    assert taken == (["a-000002", "a-000003"] if trained else ["a-000000", "a-000001"])


def test_ids_of_trajectories_started_after_the_snapshot_never_return():
    """S26 across a resume: a score of the killed driver's trajectory must not be taken for the new one's."""
    driver = Driver({"a": family(2)}, max_staleness=1)
    starts = driver.take_starts()
    driver(done(starts[0], None, scorer="s"))  # awaits its score when the state is saved
    state = json.loads(json.dumps(driver.gate.snapshot()))
    for start in starts[1:]:
        driver(failed(start))  # retried, unknown to the snapshot
    driver.play_all(0)
    driver(BatchRequested(0))
    driver(VersionLoaded(1))  # new groups, unknown to the snapshot
    before = {*(start.trajectory_id for start in starts), *driver.gate.seats}
    for life in (1, 2):  # the first resume is killed before it saves anything
        resumed = Driver({"a": family(2)}, state={**state, "life": life}, max_staleness=1)
        again = {start.trajectory_id for start in resumed.take_starts()}
        assert len(again) == 7, "all but the one that awaits its score"
        resumed(VersionLoaded(1))
        again |= {start.trajectory_id for start in resumed.take_starts()}
        resumed(ScoreOverdue(starts[0].trajectory_id, "no score"))
        again |= {start.trajectory_id for start in resumed.take_starts()}
        assert not again & before
        before |= again


def test_a_resume_refuses_families_it_does_not_know():
    driver = Driver({"a": family()})
    with pytest.raises(ValueError, match=r"has the families \['a'\]"):
        Driver({"b": family()}, state=driver.gate.snapshot())


def test_wrong_drivers_are_told():
    driver = Driver({"a": family()}, max_staleness=1)
    driver(VersionLoaded(1))
    with pytest.raises(ValueError, match="versions only grow"):
        driver(VersionLoaded(0))
    with pytest.raises(ValueError, match="batch 3 was asked for, but the next one is batch 1"):
        driver(BatchRequested(3))


def finish(driver: Driver, *group_ids: str, version: int = 0) -> None:
    for group_id in group_ids:
        for start in [start for start in driver.starts if start.group_id == group_id]:
            driver(done(start, float(start.member), version))


def test_a_window_lets_a_batch_go_without_a_late_group_that_is_trained_later():
    """The late family keeps its share of what is trained; its group is not thrown away, and never too old."""
    driver = Driver({"fast": family(2), "slow": family(2)}, max_staleness=1, share_window=3)
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001")
    driver(BatchRequested(0))
    assert [g.group_id for g in driver.batches[0].groups] == [
        "fast-000000",
        "fast-000001",
        "fast-000002",
        "slow-000001",
    ]
    assert driver.batches[0].counters["owed_groups/slow"] == 1
    assert driver.batches[0].counters["owed_groups/fast"] == -1
    assert driver.gate.missing() == {"slow": 3}


def test_what_is_owed_counts_for_admission():
    """Owed groups are not started twice: accepted + running never exceeds the budget; ahead ones are not either."""
    driver = Driver({"fast": family(2), "slow": family(2)}, max_staleness=1, share_window=3)
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001")
    driver(BatchRequested(0))
    gate = driver.gate
    assert [gate.admission.budget(name) for name in ("fast", "slow")] == [4, 4]
    assert (gate.admission.accepted("fast"), gate.admission.accepted("slow")) == (4, 1), (
        "trained and queued ones, whatever the quota"
    )
    assert len(gate.families["slow"].running) == 3
    driver(VersionLoaded(1))
    assert len(gate.families["fast"].running) == 2 and len(gate.families["slow"].running) == 5
    finish(driver, "slow-000000", "slow-000002", "slow-000003", version=0)
    driver(BatchRequested(1))
    taken = [g.group_id for g in driver.batches[1].groups]
    assert taken == ["fast-000003", "slow-000000", "slow-000002", "slow-000003"], "what was owed is paid back"
    assert driver.batches[1].counters["lag_max/slow"] == 1
    assert gate.shares.families["slow"].owed == 0


def test_a_late_group_that_is_too_old_is_evicted_and_its_place_stays_owed():
    driver = Driver({"fast": family(2), "slow": family(2)}, max_staleness=1, share_window=3)
    for start in driver.starts:
        if start.group_id == "slow-000000":
            driver(FirstSampled(start.trajectory_id, 0))
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001", "slow-000002", version=0)
    driver(BatchRequested(0))
    driver(VersionLoaded(1))
    finish(driver, "fast-000004", "fast-000005", "slow-000003", version=1)
    driver(BatchRequested(1))
    driver(VersionLoaded(2))
    assert driver.gate.families["slow"].counts["evicted_groups"] == 1
    assert driver.gate.shares.families["slow"].owed == 1
    assert (driver.gate.admission.accepted("slow"), driver.gate.admission.budget("slow")) == (3, 8)
    assert len(driver.gate.families["slow"].running) == 5, "the evicted prompt again, and four more"


def test_debts_survive_a_resume():
    families = {"fast": family(2), "slow": family(2)}
    driver = Driver(families, max_staleness=1, share_window=3)
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001")
    driver(BatchRequested(0))
    state = json.loads(json.dumps(driver.gate.snapshot()))
    trained = Driver(families, state=state, version=1, max_staleness=1, share_window=3)
    assert trained.gate.shares.families["slow"].owed == 1 and trained.gate.admission.accepted("slow") == 1
    untrained = Driver(families, state=state, version=0, max_staleness=1, share_window=3)
    assert untrained.gate.shares.families["slow"].owed == 0
    untrained(BatchRequested(0))
    assert untrained.batches[0].groups == driver.batches[0].groups, "the same batch again"


def test_without_a_window_debts_of_a_resumed_run_are_paid_at_once():
    families = {"fast": family(2), "slow": family(2)}
    driver = Driver(families, max_staleness=1, share_window=3)
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001")
    driver(BatchRequested(0))
    gate = StalenessGate("run", families, RolloutConfig(max_staleness=1))
    gate.restore(json.loads(json.dumps(driver.gate.snapshot())), version=1)
    assert gate.missing() == {"slow": 3}


@pytest.mark.parametrize("window", [None, 4])
def test_families_of_tenfold_speed_keep_their_trained_shares(window):
    """One family finishes a group at every tick, the other at every tenth: trained shares are equal over any window."""
    names = ("fast", "slow")
    driver = Driver({name: family(3, size=1) for name in names}, max_staleness=2, share_window=window)
    trained = []
    for tick in range(1, 600):
        for name in names if tick % 10 == 0 else ("fast",):
            playing = driver.gate.families[name].running
            if playing:
                group = next(iter(playing.values()))
                start = next(s for s in driver.starts if s.group_id == group.group_id)
                driver(done(start, 1.0, driver.gate.version))
        driver(BatchRequested(driver.gate.next_batch))
        while len(driver.batches) > len(trained):
            batch = driver.batches[len(trained)]
            trained.append({name: sum(g.family == name for g in batch.groups) for name in names})
            driver(VersionLoaded(batch.version + 1))
    assert len(trained) == 59 // 3 or window
    for first in range(len(trained) - (window or 1) + 1):
        of_window = trained[first : first + (window or 1)]
        for name in names:
            groups = sum(batch[name] for batch in of_window)
            assert abs(groups - 3 * len(of_window)) <= (1 if window else 0)
    assert not driver.gate.families["fast"].counts["evicted_groups"], "the fast family is paced, not discarded"


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


def test_a_resumed_service_never_hands_out_a_batch_of_the_past():
    """S11: resumed at 5, nothing starts for batches 1 to 5, and every trained token has version 5."""
    driver = Driver({"a": family(2)}, state={"version": 5}, max_staleness=0)
    assert driver.group_ids() == ["a-000010", "a-000011"], "prompts of the batches 0 to 4 are not played again"
    with pytest.raises(ValueError, match="batch 4 was asked for, but the next one is batch 5"):
        driver(BatchRequested(4))
    driver.play_all(5)
    driver(BatchRequested(5))
    assert {m.oldest_version for g in driver.batches[0].groups for m in g.members} == {5}


def test_an_older_format_of_the_state_is_refused():
    state = Driver({"a": family()}).gate.snapshot()
    with pytest.raises(ValueError, match="has format 1, this version reads 2"):
        Driver({"a": family()}, state={**state, "format": 1})
