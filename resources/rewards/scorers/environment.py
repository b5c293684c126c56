"""The environment's own outcome as the score: what an episode earned while it was played."""

from __future__ import annotations

from typing import Literal

from resources.rewards.base import Score, ScoringRequest


class EnvironmentScorer:
    """Scored inline, where the episode was played: a verdict that is already known does not pay a round trip.

    Payload: ``reward`` (the sum of the step rewards), and optionally ``components`` and ``success``.
    """

    name = "environment"
    version = "1"
    runs: Literal["inline", "pool"] = "inline"

    def score(self, request: ScoringRequest) -> Score:
        """Raises ValueError when the payload has no ``reward``."""
        if "reward" not in request.payload:
            raise ValueError(f"payload of {request.trajectory_id!r} has no 'reward'; it has {sorted(request.payload)}")
        return Score(
            trajectory_id=request.trajectory_id,
            scorer=request.scorer,
            scorer_version=request.scorer_version,
            reward=float(request.payload["reward"]),
            success=request.payload.get("success"),
            components={name: float(value) for name, value in request.payload.get("components", {}).items()},
        )
