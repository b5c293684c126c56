"""The staleness gate under random event orders: invariants after each event, the bound on every trained trajectory."""

from __future__ import annotations

import json

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resources.environments.family import FamilyConfig
from resources.failures import FailureClass
from resources.rewards.base import Score
from resources.rollout.config import RolloutConfig
from resources.rollout.gate_events import (
    BatchRequested,
    Cancel,
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
from resources.rollout.messages import BatchGroup, TrajectoryDone
from resources.rollout.staleness import StalenessGate
from resources.trajectories.trajectory import TrajectoryRef


class World(RuleBasedStateMachine):
    """Workers, engines, scorers and a learner that do what they like, in any order."""

    @initialize(data=st.data())
    def build(self, data):
        integers = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
        self.families = {
            name: FamilyConfig(
                environment="e",
                hardware_class="c",
                groups_per_iteration=integers(1, 4),
                group_size=integers(1, 3),
                redundant_groups=integers(0, 1),
                redundant_members=integers(0, 1),
                max_concurrent_groups=integers(1, 6),
                num_prompts=data.draw(st.sampled_from([None, 1, 3])),
            )
            for name in ("a", "b", "c")[: integers(1, 3)]
        }
        alpha = integers(0, 2)
        self.alpha, self.most_behind = alpha, data.draw(st.sampled_from([0, 0, 1, 3])) if alpha else 0
        """Stale engines hold a version up to so much older than the one served (0: there are none)."""
        self.window = data.draw(st.sampled_from([None, 2, 3])) if alpha else None
        self.config = RolloutConfig(
            pipeline="asynchronous" if alpha else "synchronous",
            max_staleness=alpha,
            cross_policy={"p_stale": 0.5, "refresh_every": self.most_behind + 1} if self.most_behind else None,
            max_reissues=integers(0, 2),
            max_member_retries=integers(0, 2),
            minimum_group=integers(1, 2),
            member_failure=data.draw(st.sampled_from(["fail_fast", "retry", "minimum_group"])),
            stale_policy=data.draw(st.sampled_from(["evict", "evict", "finish_masked"])),
            dynamic_sampling=data.draw(st.booleans()),
            max_replaced_groups=3,
            max_failed_groups=data.draw(st.sampled_from([None, 2])),
            max_stale_groups=data.draw(st.sampled_from([None, 2])),
            share_window=self.window,
            share_slack=integers(1, 2),
            curriculum=data.draw(st.sampled_from([None, "informative_prompts"])),
            curriculum_arguments={},
        )
        self.gate = StalenessGate("r", self.families, self.config)
        self.learner = 0
        self.running: dict[str, tuple[Start, int | None]] = {}
        """Played by workers: with the oldest version sampled (None: nothing yet)."""
        self.started_at: dict[str, int] = {}
        self.stopping: set[str] = set()
        self.awaiting: set[str] = set()
        self.past: list[TrajectoryDone] = []
        self.ever_started: set[str] = set()
        self.trained: dict[str, int] = {}
        self.oldest_of: dict[str, int | None] = {}
        self.taken: dict[int, dict[str, int]] = {}
        """Groups of each family in every batch taken from here."""
        self.asked: int | None = None
        self.reserved: dict[int, dict[str, BatchGroup]] = {}
        """What the gate ever promised, by batch."""
        self.feed(Opened())

    def feed(self, event):
        for decision in self.gate.handle(event):
            match decision:
                case Start(trajectory_id):
                    assert trajectory_id not in self.ever_started, "a trajectory id is used once"
                    self.ever_started.add(trajectory_id)
                    self.running[trajectory_id] = (decision, None)
                    self.started_at[trajectory_id] = self.gate.version
                case Cancel(trajectory_id):
                    assert trajectory_id in self.running, "only what runs is cancelled"
                    if decision.termination == "evicted_stale":
                        self.check_eviction(self.running[trajectory_id][0].group_id)
                    self.stopping.add(trajectory_id)
                case TakeBatch():
                    self.check_batch(decision)
                    self.asked = None
                case TooManyLost(family, cause, number):
                    limits = {
                        "dead": self.config.max_replaced_groups if self.config.dynamic_sampling else None,
                        "failed": self.config.max_failed_groups,
                        "stale": self.config.max_stale_groups if self.config.stale_policy == "evict" else None,
                    }
                    assert number > limits[cause], (family, cause, number)
        self.gate.validate()
        self.check_reserved()
        for name, family in self.families.items():
            state = self.gate.families[name]
            owed = self.gate.shares.families[name].owed
            accepted = self.gate.next_batch * family.groups_per_iteration - owed + len(state.complete)
            ceiling = (self.config.max_staleness + self.gate.version + 1) * family.groups_per_iteration
            assert accepted <= ceiling and accepted + len(state.running) <= ceiling + family.redundant_groups
        if self.asked is not None and self.asked < self.gate.next_batch:
            self.asked = None  # a version that did not come from here was loaded
        if self.asked is not None and not isinstance(event, BatchRequested):
            self.feed(BatchRequested(self.asked))

    def check_eviction(self, group_id: str):
        """Stale tokens alone doom no group that started in time for the batch: a member's start is too long ago."""
        starts = [version for key, version in self.started_at.items() if f"/{group_id}/" in key]
        assert self.gate.horizon - min(starts) > self.alpha, (group_id, starts, self.gate.horizon)

    def sampled(self, data, trajectory_id) -> int:
        """A version that may have sampled now: any served since the start, or one that a stale engine then held."""
        version = data.draw(st.integers(self.started_at[trajectory_id], self.gate.version))
        return max(0, version - data.draw(st.integers(0, self.most_behind)))

    def check_reserved(self):
        """What was promised to the next batch stays promised, and unchanged."""
        version = self.gate.next_batch
        groups = {group.group_id: group for group in self.gate.reserved(version)}
        assert self.reserved.get(version, {}).items() <= groups.items(), "a promise is kept until the batch is taken"
        self.reserved = {version: groups}

    def check_batch(self, batch: TakeBatch):
        taken = {group.group_id: group for group in batch.groups}
        assert self.reserved.get(batch.version, {}).items() <= taken.items(), "the batch holds what was promised"
        for name, family in self.families.items():
            groups = [group for group in batch.groups if group.family == name]
            self.taken.setdefault(batch.version, {})[name] = len(groups)
            assert len(groups) >= 1, "no batch lacks a family"
            if self.window is None:
                assert len(groups) == family.groups_per_iteration, "exactly the configured share"
            for group in groups:
                assert group.group_id not in self.trained, "a prompt is trained once"
                self.trained[group.group_id] = batch.version
                assert 1 <= len(group.members) <= family.group_size
                for member in group.members:
                    oldest = self.oldest_of[member.trajectory_id]
                    assert member.oldest_version == oldest
                    if self.config.stale_policy == "evict" and oldest is not None:
                        assert batch.version - oldest <= self.alpha + self.most_behind, "the bound"
        assert len(batch.groups) == sum(family.groups_per_iteration for family in self.families.values())
        self.check_window(batch.version)
        self.learner = batch.version

    def check_window(self, newest: int):
        """Over any ``window`` batches in a row the trained shares are the configured ones, up to the slack."""
        batches = [self.taken.get(newest - age) for age in range(self.window or 1)]
        for name, family in self.families.items():
            if all(batches):
                trained = sum(batch[name] for batch in batches)
                slack = min(self.config.share_slack, family.groups_per_iteration - 1) if self.window else 0
                assert abs(trained - len(batches) * family.groups_per_iteration) <= slack, (name, batches)

    def finish(self, trajectory_id, reward, awaits, failure, sampled_version):
        start, oldest = self.running.pop(trajectory_id)
        oldest = min((version for version in (oldest, sampled_version) if version is not None), default=None)
        self.stopping.discard(trajectory_id)
        self.oldest_of[trajectory_id] = oldest
        unscored = failure is not None and not failure.is_scored
        done = TrajectoryDone(
            trajectory_id, start.family, start.group_id, start.member, start.attempt,
            None if unscored else TrajectoryRef("f", 0), None if awaits or unscored else reward,
            awaits and not unscored, None, failure, "", "terminated", oldest, oldest, 1, 2, 1, 0, False, 0.0,
        )  # fmt: skip
        self.past.append(done)
        if awaits and not unscored:
            self.awaiting.add(trajectory_id)
        self.feed(MemberDone(done))

    # -- what may happen ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), awaits=st.booleans())
    def finishes(self, data, reward, awaits):
        trajectory_id = data.draw(st.sampled_from(sorted(self.running)))
        version = self.sampled(data, trajectory_id)
        if trajectory_id in self.stopping:
            self.finish(trajectory_id, 0.0, False, FailureClass.CANCELLED, None)
        else:
            self.finish(trajectory_id, reward, awaits, None, data.draw(st.sampled_from([version, version, None])))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(1, 8), newest_first=st.booleans())
    def several_go_well(self, number, newest_first):
        for trajectory_id in sorted(self.running, reverse=newest_first)[:number]:
            if trajectory_id in self.running and trajectory_id not in self.stopping:
                reward = float(self.running[trajectory_id][0].member == 0)
                self.finish(trajectory_id, reward, False, None, self.gate.version)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(), late=st.integers(0, 2), sampled_at_start=st.booleans(), is_loaded=st.booleans(),
        is_stale=st.booleans(),
    )  # fmt: skip
    def an_iteration_goes_by(self, data, late, sampled_at_start, is_loaded, is_stale):
        """All that runs goes well, but for a few groups of one family; the batch follows if it can. The load may not:
        then the learner is ahead of the engines."""
        name = data.draw(st.sampled_from(sorted(self.families)))
        held = set(list(self.gate.families[name].running)[:late])
        for trajectory_id in list(self.running):
            start = self.running[trajectory_id][0]
            if trajectory_id not in self.stopping and start.group_id not in held:
                version = self.started_at[trajectory_id] if sampled_at_start else self.gate.version
                version = max(0, version - self.most_behind * is_stale)
                self.finish(trajectory_id, float(start.member == 0), False, None, version)
        self.the_learner_asks()
        if is_loaded and self.gate.version <= self.learner and self.asked is None:
            self.weights_are_loaded()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failure=st.sampled_from([FailureClass.ENVIRONMENT, FailureClass.ENGINE, FailureClass.POLICY]))
    def fails(self, data, failure):
        trajectory_id = data.draw(st.sampled_from(sorted(self.running)))
        self.finish(trajectory_id, 0.0, False, failure, None)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def samples(self, data):
        trajectory_id = data.draw(st.sampled_from(sorted(self.running)))
        start, oldest = self.running[trajectory_id]
        version = self.sampled(data, trajectory_id)
        if oldest is None or version < oldest:  # without stale engines the oldest token is the first one
            self.running[trajectory_id] = (start, version)
            self.feed(FirstSampled(trajectory_id, version))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def is_lost(self, data):
        trajectory_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[trajectory_id]
        self.stopping.discard(trajectory_id)
        self.feed(TrajectoryLost(trajectory_id, "lost"))

    @precondition(lambda self: self.awaiting)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0, None]))
    def is_scored(self, data, reward):
        trajectory_id = data.draw(st.sampled_from(sorted(self.awaiting)))
        self.awaiting.discard(trajectory_id)
        failure = FailureClass.REWARD if reward is None else None
        self.feed(ScoreArrived(Score(trajectory_id, "s", "1", reward, failure=failure)))

    @precondition(lambda self: self.awaiting)
    @rule(data=st.data())
    def score_is_overdue(self, data):
        self.feed(ScoreOverdue(data.draw(st.sampled_from(sorted(self.awaiting)))))

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def a_duplicate_arrives(self, data):
        done = data.draw(st.sampled_from(self.past))
        self.feed(MemberDone(done))
        self.feed(ScoreArrived(Score(done.trajectory_id, "s", "1", 0.5)) if not done.awaits_score else MemberDone(done))

    @precondition(lambda self: self.gate.version < self.learner + 1)
    @rule()
    def weights_are_loaded(self):
        self.feed(VersionLoaded(self.gate.version + 1))

    @rule()
    def the_learner_asks(self):
        self.asked = self.gate.next_batch
        self.feed(BatchRequested(self.asked))

    @rule()
    def the_driver_is_restarted(self):
        before = self.gate
        state = json.loads(json.dumps(before.snapshot()))
        self.gate = StalenessGate("r", self.families, self.config)
        self.gate.restore(state)
        if self.gate.next_batch < before.next_batch:
            self.trained = {group: v for group, v in self.trained.items() if v < self.gate.next_batch}
            self.taken = {v: groups for v, groups in self.taken.items() if v < self.gate.next_batch}
        self.running, self.stopping, self.asked, self.reserved = {}, set(), None, {}
        self.awaiting &= set(self.gate.seats)
        self.gate.validate()
        self.feed(Opened())

    @invariant()
    def workers_and_gate_agree(self):
        if hasattr(self, "gate"):
            played = {key for key in self.running if key not in self.stopping}
            awaited = set(self.gate.awaiting_score())
            assert set(self.gate.seats) - awaited == played
            assert awaited <= self.awaiting

    def teardown(self):
        """Whatever happened before, from now on everything goes well: the learner gets its batch."""
        if not hasattr(self, "gate"):
            return
        self.asked = None
        while self.gate.version < self.gate.next_batch:
            self.feed(VersionLoaded(self.gate.version + 1))
        wanted = self.gate.next_batch
        self.the_learner_asks()
        for _ in range(10_000):
            if self.gate.next_batch > wanted:
                return
            if self.awaiting:
                self.is_scored_well(self.awaiting.pop())
            elif self.running:
                trajectory_id = next(iter(self.running))
                stopping = trajectory_id in self.stopping
                member = self.running[trajectory_id][0].member
                failure = FailureClass.CANCELLED if stopping else None
                self.finish(trajectory_id, float(member == 0), False, failure, self.gate.version)
            else:
                break
        raise AssertionError("the batch never came")

    def is_scored_well(self, trajectory_id):
        self.feed(ScoreArrived(Score(trajectory_id, "s", "1", float(trajectory_id.split("/")[2] == "0"))))


World.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRandomEventOrders = World.TestCase
