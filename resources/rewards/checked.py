"""Is this a reward, and is this an answer to a scoring request? Asked wherever a user's numbers come in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resources.rewards.base import Score, ScoringRequest

HIGHEST_REWARD = 1e18
"""In magnitude. Advantages are float32, and statistics square them: beyond it they overflow."""


def is_reward(value: float) -> bool:
    """Whether statistics over it stay finite; not for NaN and infinities."""
    return abs(value) <= HIGHEST_REWARD


def checked_score(score: Any, request: ScoringRequest) -> Score:
    """The scorer's answer with Python's own numbers. Raises ValueError when it is no answer to this request."""
    if not isinstance(score, Score):
        raise ValueError(f"score() returned {type(score).__name__}; it must return resources.rewards.base.Score")
    if score.trajectory_id != request.trajectory_id:
        raise ValueError(f"score() answers for trajectory {score.trajectory_id!r}, not for {request.trajectory_id!r}")
    if (score.reward is None) != (score.failure is not None):
        raise ValueError(f"score() gave reward {score.reward} with failure {score.failure}; give exactly one of them")
    reward = None if score.reward is None else float(score.reward)
    components = {str(name): float(value) for name, value in score.components.items()}
    for name, value in [("reward", reward), *components.items()]:
        if value is not None and not is_reward(value):
            raise ValueError(f"score() gave {name} {value}; it must be finite, and at most {HIGHEST_REWARD:g} in size")
    success = None if score.success is None else bool(score.success)
    return replace(score, reward=reward, success=success, components=components)
