"""Per-turn rewards with discount: each action is credited with what came after it (REINFORCE's return to go, Williams
1992; for turns of language-model agents arXiv 2505.11821, section 3)."""

from __future__ import annotations

import math

import numpy as np

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.episodes import discounted_returns, episode_turns
from tasks.training.advantages.groups import RewardGroup, assemble, group_rows, is_dead
from tasks.training.algorithm_config import AdvantageConfig


class TurnReturns:
    """Advantage of a turn: (G - mean) / (std + epsilon), G its discounted return to go.

    Mean and deviation are over the turns of the group's scored rollouts, in which every rollout weighs the same however
    many turns it has. With rewards at the end only and no discount this is GRPO. A group whose returns are all equal is
    dead.
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        groups = group_rows(inputs)
        values = [np.zeros(len(row.token_ids), np.float32) for row in inputs.rows]
        dropped = frozenset(group.group_id for group in groups if not self._fill(inputs, group, values))
        return assemble(inputs, groups, values, dropped=dropped)

    def _fill(self, inputs: AdvantageInputs, group: RewardGroup, values: list[np.ndarray]) -> bool:
        """Write the group's advantages; False when there is nothing to learn from it."""
        episodes = []
        for rollout_id, indices in group.rows.items():
            reward = group.rewards[rollout_id]
            if reward is None:
                continue
            final = inputs.rows[indices[0]].reward
            assert final is not None, rollout_id
            turns = episode_turns(inputs, indices, final, "turn_returns")
            if turns:
                episodes.append((turns, discounted_returns([turn.reward for turn in turns], self.config.discount)))
        if len(episodes) < 2 or is_dead([value for _, returns in episodes for value in returns]):
            return False
        means = [math.fsum(returns) / len(returns) for _, returns in episodes]
        mean = math.fsum(means) / len(means)
        squares = [math.fsum((value - mean) ** 2 for value in returns) / len(returns) for _, returns in episodes]
        scale = 1.0
        if self.config.scaling == "group":
            scale = math.sqrt(math.fsum(squares) / len(squares)) + self.config.epsilon
        for turns, returns in episodes:
            for turn, value in zip(turns, returns, strict=True):
                values[turn.row][turn.span.action_start : turn.span.action_end] = (value - mean) / scale
        return True
