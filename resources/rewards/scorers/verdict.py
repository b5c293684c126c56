"""What do the built-in scorers say alike? What a payload must hold, and what makes up the reward of a verdict."""

from __future__ import annotations

from typing import Any

from resources.environments.action_text import INVALID_ACTION_PENALTY
from resources.rewards.base import Score, ScoringRequest


def payload_with(request: ScoringRequest, *keys: str) -> dict[str, Any]:
    """The payload of a request. Raises ValueError when it lacks one of the keys."""
    missing = set(keys) - request.payload.keys()
    if missing:
        raise ValueError(
            f"payload of {request.trajectory_id!r} lacks {sorted(missing)}; it has {sorted(request.payload)}"
        )
    return request.payload


def verdict(request: ScoringRequest, success: bool, message: str = "") -> Score:
    """1 or 0 for the outcome, and what the malformed actions of the episode cost; each is a component of the reward.

    Raises ValueError when ``num_invalid_actions`` of the payload is no count; absent means none.
    """
    num_invalid_actions = request.payload.get("num_invalid_actions", 0)
    if isinstance(num_invalid_actions, bool) or not isinstance(num_invalid_actions, int) or num_invalid_actions < 0:
        raise ValueError(f"payload num_invalid_actions is {num_invalid_actions!r}; it must be an integer >= 0")
    components = {"outcome": float(success), "invalid_action": INVALID_ACTION_PENALTY * num_invalid_actions}
    return Score(
        trajectory_id=request.trajectory_id,
        scorer=request.scorer,
        scorer_version=request.scorer_version,
        reward=sum(components.values()),
        success=success,
        components=components,
        failure_message=message,
    )
