"""What the staleness gate hears (events) and what it decides (decisions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from resources.rewards.base import Score
from resources.rollout.messages import BatchGroup, TrajectoryDone

CancelTermination = Literal["evicted_stale", "cancelled_redundant", "preempted"]
"""Why a running trajectory is stopped: its group is beyond the bound, it is no longer needed, or its group was
dropped."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The service is up: groups may start."""


@dataclass(frozen=True, slots=True)
class VersionLoaded:
    """Every engine serves this policy version."""

    version: int


@dataclass(frozen=True, slots=True)
class FirstSampled:
    """A running trajectory has its first sampled token, of this version, or one that is older than all before it (with
    cross-policy sampling a later turn may be)."""

    trajectory_id: str
    version: int


@dataclass(frozen=True, slots=True)
class MemberDone:
    """A trajectory has ended, well or badly (also the confirmation of a cancellation)."""

    done: TrajectoryDone


@dataclass(frozen=True, slots=True)
class TrajectoryLost:
    """A trajectory will never report: its worker is lost, or it was cancelled before any worker had it."""

    trajectory_id: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ScoreArrived:
    score: Score


@dataclass(frozen=True, slots=True)
class ScoreOverdue:
    """The awaited score of a trajectory did not come within its deadline."""

    trajectory_id: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class BatchRequested:
    """The learner, at this version, wants its batch. Asked again after each event until it is there."""

    version: int


Event = (
    Opened | VersionLoaded | FirstSampled | MemberDone | TrajectoryLost | ScoreArrived | ScoreOverdue | BatchRequested
)


@dataclass(frozen=True, slots=True)
class Start:
    """Play one member of a group."""

    trajectory_id: str
    family: str
    group_id: str
    prompt_index: int
    """Which prompt of the family."""
    member: int
    attempt: int
    group_size: int
    is_retry: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a trajectory at once: environment closed, engine slot freed."""

    trajectory_id: str
    termination: CancelTermination


@dataclass(frozen=True, slots=True)
class TakeBatch:
    """The batch is complete, within the bound, and now belongs to the learner."""

    version: int
    groups: tuple[BatchGroup, ...]
    counters: dict[str, Any]
    """Flat, ``<figure>/<family>``: lags of what is trained, and what was counted since the last batch."""


Lost = Literal["dead", "failed", "stale"]
"""Why a group that was played is not trained on: without signal and replaced, without enough scored members, or beyond
the staleness bound."""


@dataclass(frozen=True, slots=True)
class TooManyLost:
    """A family lost more groups, of one cause, than allowed for one batch."""

    family: str
    cause: Lost
    number: int


Decision = Start | Cancel | TakeBatch | TooManyLost
