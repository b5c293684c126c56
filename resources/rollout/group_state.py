"""The records the staleness gate keeps: members, groups, families, and their JSON form for a resume."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from resources.environments.family import FamilyConfig
from resources.failures import FailureClass
from resources.rollout.curriculum import SuccessRecord
from resources.rollout.gate_events import Lost
from resources.rollout.messages import BatchGroup, BatchMember, PolicyCounts, TrajectoryDone
from resources.rollout.prompts import Prompts
from resources.trajectories.trajectory import TrajectoryRef

ATTEMPTS_OF_A_LIFE = 1000
"""Attempts of the n-th resume of a run start at n times this."""
EQUAL_REWARDS = 1e-8
"""Rewards of a group that lie within this of each other carry no signal (group-centred advantages are all 0)."""


class MemberState(StrEnum):
    PENDING = "pending"
    """To be started when its group is admitted."""
    RUNNING = "running"
    AWAITING_SCORE = "awaiting_score"
    SCORED = "scored"
    FAILED = "failed"
    """Retries used up: unscored for good."""
    CANCELLED = "cancelled"
    """Not needed any more: enough others are scored."""

    @property
    def is_alive(self) -> bool:
        return self in (MemberState.PENDING, MemberState.RUNNING, MemberState.AWAITING_SCORE)


@dataclass(slots=True, eq=False)
class Member:
    """One seat of a group. ``attempt`` counts on over retries, re-issues and resumes, so that a trajectory id never
    returns."""

    index: int
    state: MemberState = MemberState.PENDING
    attempt: int = 0
    first_attempt: int = 0
    """Lower attempts belong to earlier lives of the run."""
    num_failures: int = 0
    """Since the group was (re-)issued."""
    oldest_version: int | None = None
    """Oldest sampled version, as soon as it is known."""
    done: TrajectoryDone | None = None
    reward: float | None = None
    success: bool | None = None
    scorer_version: str = "1"

    def play_again(self) -> None:
        """Forget this attempt; the next one has a new id."""
        self.attempt = max(self.attempt + 1, self.first_attempt)
        self.state = MemberState.PENDING
        self.oldest_version = self.done = self.reward = self.success = None

    def enter_life(self, first_attempt: int) -> None:
        """The run was resumed: what its killed driver started after the state was saved has ids of its own."""
        self.first_attempt = first_attempt
        if self.state is MemberState.RUNNING:
            self.play_again()
        elif self.state is MemberState.PENDING:
            self.attempt = max(self.attempt, first_attempt)


@dataclass(slots=True, eq=False)
class Group:
    family: str
    group_id: str
    number: int
    """Groups of the family issued before it."""
    prompt_index: int
    """Which prompt: the number again, or an index in the family's pool."""
    group_size: int
    members: list[Member]
    num_reissues: int = 0

    @classmethod
    def new(cls, family: str, number: int, prompt_index: int, config: FamilyConfig, first_attempt: int = 0) -> Group:
        seats = [
            Member(index, attempt=first_attempt, first_attempt=first_attempt)
            for index in range(config.group_size + config.redundant_members)
        ]
        return cls(family, f"{family}-{number:06d}", number, prompt_index, config.group_size, seats)

    def count(self, state: MemberState) -> int:
        return sum(member.state is state for member in self.members)

    @property
    def num_alive(self) -> int:
        return sum(member.state.is_alive for member in self.members)

    @property
    def oldest_version(self) -> int | None:
        """Oldest version sampled by any member that counts; None while nobody has sampled."""
        known = [
            member.oldest_version
            for member in self.members
            if member.oldest_version is not None and member.state not in (MemberState.FAILED, MemberState.CANCELLED)
        ]
        return min(known, default=None)

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ. A group of one has no baseline of its own and is never called dead."""
        rewards = [member.reward for member in self.members if member.state is MemberState.SCORED]
        values = [reward for reward in rewards if reward is not None]
        return len(values) < 2 or max(values) - min(values) > EQUAL_REWARDS

    @property
    def success(self) -> float:
        """Share of the scored members that succeeded; a reward above 0 is a success where nobody gave a verdict."""
        scored = [member for member in self.members if member.state is MemberState.SCORED]
        verdicts = [(m.reward or 0.0) > 0 if m.success is None else m.success for m in scored]
        return sum(verdicts) / len(verdicts)

    def reissue(self) -> None:
        """Start over with the same prompt and seed: every member, scored ones included."""
        self.num_reissues += 1
        for member in self.members:
            member.play_again()
            member.num_failures = 0

    def as_batch_group(self, seed_env: int) -> BatchGroup:
        members = []
        for member in self.members:
            if member.state is MemberState.SCORED:
                assert member.done is not None and member.done.ref is not None, member
                members.append(
                    BatchMember(
                        trajectory_id=member.done.trajectory_id,
                        ref=member.done.ref,
                        reward=member.reward,
                        success=member.success,
                        scorer=member.done.scorer,
                        scorer_version=member.scorer_version,
                        oldest_version=member.oldest_version,
                    )
                )
        return BatchGroup(self.group_id, self.family, seed_env, tuple(members))


@dataclass(slots=True)
class FamilyState:
    """The groups of one family. Every group issued is in exactly one of: waiting, running, complete, trained,
    dropped."""

    config: FamilyConfig
    prompts: Prompts
    """Which prompt the next group gets."""
    cursor: int = 0
    """Groups issued so far: the number of the next one."""
    waiting: deque[Group] = field(default_factory=deque)
    """Re-issued or resumed, to be admitted before any new prompt; in neither count."""
    running: dict[str, Group] = field(default_factory=dict)
    complete: deque[Group] = field(default_factory=deque)
    """Scored and kept, not yet trained, in order of completion."""
    in_training: list[Group] = field(default_factory=list)
    """Taken by the learner; final once the version trained on them is loaded."""
    num_trained: int = 0
    """Groups taken before ``in_training``, final ones."""
    num_dropped: int = 0
    """Groups given up: stale or failed beyond their re-issues, redundant, or without signal."""
    lost_for_batch: Counter[Lost] = field(default_factory=Counter)
    """Groups lost since the last batch was taken, by cause; those issued again count too."""
    success: SuccessRecord = field(default_factory=SuccessRecord)
    """Running success of the groups that were scored."""
    counts: Counter[str] = field(default_factory=Counter)
    """Cumulative counters, flat names (``evicted_groups``, ``failed.environment``, ``cancelled_redundant.tokens``,
    ...)."""

    def note_success(self, group: Group) -> None:
        """A group was scored: what a curriculum learns from."""
        self.success = self.success.after(group.success)
        self.prompts.note(group.prompt_index, group.success)

    def open_groups(self) -> list[Group]:
        return [*self.running.values(), *self.waiting]


def group_as_json(group: Group) -> dict[str, Any]:
    record = asdict(group)
    for member in record["members"]:
        if member["done"] is not None and member["done"]["failure"] is not None:
            member["done"]["failure"] = str(member["done"]["failure"])
        member["state"] = str(member["state"])
    return record


def group_from_json(record: dict[str, Any]) -> Group:
    members = []
    for stored in record["members"]:
        done = stored["done"]
        if done is not None:
            done = dict(done)
            done["ref"] = None if done["ref"] is None else TrajectoryRef(**done["ref"])
            done["failure"] = None if done["failure"] is None else FailureClass(done["failure"])
            done["policies"] = PolicyCounts(**done.get("policies", {}))
            done = TrajectoryDone(**done)
        members.append(Member(**{**stored, "state": MemberState(stored["state"]), "done": done}))
    return Group(**{**record, "members": members})
