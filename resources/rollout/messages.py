"""What travels between the group queue and the rollout workers: references and small facts, never tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from resources.failures import FailureClass
from resources.trajectories.trajectory import TrajectoryRef

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """One trajectory to play."""

    run_id: str
    family: str
    group_id: str
    """Unique in the run, e.g. ``frozen_lake-000012`` (``eval-...`` for evaluation)."""
    member: int
    attempt: int
    group_size: int
    seed_env: int
    """Shared by the members of a group."""
    seed_sampling: int
    """Distinct for every member and attempt (M21)."""
    split: Split = "train"
    greedy: bool = False

    @property
    def trajectory_id(self) -> str:
        return f"{self.run_id}/{self.group_id}/{self.member}/{self.attempt}"


@dataclass(frozen=True, slots=True)
class PolicyCounts:
    """What cross-policy sampling did to one trajectory, or to several."""

    stale_turns: int = 0
    """Turns that a stale engine sampled, in part at least."""
    stale_tokens: int = 0
    """Tokens sampled by stale engines."""
    unserved_turns: int = 0
    """Turns drawn for a stale engine that current ones sampled, since no stale one could be used."""
    moved_turns: int = 0
    """Turns sampled on another engine than the turn before them."""
    prefilled_again_tokens: int = 0
    """Tokens of those turns' histories that the engine before held and this one had to compute."""


@dataclass(frozen=True, slots=True)
class TrajectoryDone:
    """A trajectory has ended (well or badly), and its row, if it has one, is sealed in the store."""

    trajectory_id: str
    family: str
    group_id: str
    member: int
    attempt: int
    ref: TrajectoryRef | None
    reward: float | None
    """Inline reward; None while the pool judges, and for unscored ones."""
    awaits_score: bool
    """A scoring request was submitted; a `ScoreArrived` follows."""
    success: bool | None
    failure: FailureClass | None
    failure_message: str
    termination: str
    oldest_version: int | None
    newest_version: int | None
    num_sampled_tokens: int
    num_tokens: int
    num_turns: int
    num_invalid_actions: int
    truncated: bool
    duration_s: float
    scorer: str = "environment"
    scorer_version: str = "1"
    policies: PolicyCounts = PolicyCounts()


Stage = Literal["environment", "engine", "others", "store"]
"""What a running trajectory waits for: its environment, an engine, with batch stepping the others of its worker, or the
sealing of its row."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a running trajectory has been waiting for, for some time."""

    trajectory_id: str
    what: str
    """For people: ``step 2 of environment 'frozen_lake'``, ``generation 3 on engine-compute-0``."""
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a rollout worker says to the group queue: what it can carry, and everything new since its last report."""

    worker_id: str
    capacity: int
    """Trajectories it may hold at once; the queue subtracts what it has assigned (so reports may cross on the wire)."""
    done: tuple[TrajectoryDone, ...] = ()
    sampled: tuple[tuple[str, int], ...] = ()
    """(trajectory_id, policy version of its first sampled token, or of one that is older than all before)."""
    waiting: tuple[Wait, ...] = ()
    """The longest waits, a bounded number."""
    log: tuple[str, ...] = ()
    """New lines for people. At most a few."""
    held: tuple[str, ...] | None = None
    """Every trajectory it holds: in the first report, after a failed exchange, and when the queue asked to resync. What
    the queue assigned beyond these never arrived."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The queue's answer to a rollout worker."""

    assignments: tuple[Assignment, ...] = ()
    cancels: tuple[tuple[str, str], ...] = ()
    """(trajectory_id, termination) to stop at once: environment closed, engine slot freed."""
    closing: bool = False
    """The run is over: cancel everything and end."""
    resync: bool = False
    """The queue does not know this worker (any more): say with the next report what is `held`."""


@dataclass(frozen=True, slots=True)
class BatchMember:
    trajectory_id: str
    ref: TrajectoryRef
    reward: float | None
    """Final reward (inline or from the pool). None: unscored, out of every statistic."""
    success: bool | None
    scorer: str
    scorer_version: str
    oldest_version: int | None
    """None when no token was sampled."""


@dataclass(frozen=True, slots=True)
class BatchGroup:
    group_id: str
    family: str
    seed_env: int
    members: tuple[BatchMember, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Groups that a batch is sure to hold, before it is complete."""

    groups: tuple[BatchGroup, ...]
    """Those that the asker does not know yet."""
    is_all: bool
    """The batch is complete: no more will come."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch v: what version v+1 is trained on. Written as the batch manifest ``batches/<v>.json``."""

    run_id: str
    version: int
    groups: tuple[BatchGroup, ...]
    counters: dict[str, Any] = field(default_factory=dict)
    """Per-family counts and lags for the metrics (evicted, failed, dead, cancelled, lag histogram, ...)."""
