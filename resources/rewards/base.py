"""Scores: stateless judgement of a finished trajectory, inline or on the reward pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from resources.failures import FailureClass


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """One judgement to make; keyed (trajectory_id, scorer, scorer_version)."""

    trajectory_id: str
    family: str
    scorer: str
    scorer_version: str
    payload: dict[str, Any]
    """What `Environment.judgement` returned (JSON-able)."""
    deadline_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Score:
    trajectory_id: str
    scorer: str
    scorer_version: str
    reward: float | None
    """None exactly when ``failure`` is set: the trajectory stays unscored."""
    success: bool | None = None
    components: dict[str, float] = field(default_factory=dict)
    failure: FailureClass | None = None
    failure_message: str = ""
    duration_s: float = 0.0


class Scorer(Protocol):
    """A pure function of the payload. ``runs`` says where: inline in the environment worker, or on the reward pool."""

    name: str
    version: str
    runs: Literal["inline", "pool"]

    def score(self, request: ScoringRequest) -> Score: ...
