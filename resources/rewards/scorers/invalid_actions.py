"""What a malformed action costs on the reward pool: one rule for every built-in scorer."""

from __future__ import annotations

from typing import Any

INVALID_ACTION_REWARD = -0.1
"""Reward of each malformed action."""


def reward_components(outcome: float, payload: dict[str, Any]) -> dict[str, float]:
    """The parts of the final reward: the outcome, and what the malformed actions of the episode cost.

    Raises ValueError when ``payload["num_invalid_actions"]`` is no count; absent means none.
    """
    num_invalid_actions = payload.get("num_invalid_actions", 0)
    if isinstance(num_invalid_actions, bool) or not isinstance(num_invalid_actions, int) or num_invalid_actions < 0:
        raise ValueError(f"payload num_invalid_actions is {num_invalid_actions!r}; it must be an integer >= 0")
    return {"outcome": outcome, "invalid_action": INVALID_ACTION_REWARD * num_invalid_actions}
