"""A staleness gate that is driven by hand: events in, decisions collected, invariants checked after each event."""

from __future__ import annotations

from resources.environments.family import FamilyConfig
from resources.failures import FailureClass
from resources.rollout.config import RolloutConfig
from resources.rollout.gate_events import (
    Cancel,
    Decision,
    Event,
    MemberDone,
    Opened,
    Start,
    TakeBatch,
    TooManyLost,
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
