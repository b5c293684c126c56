"""GRPO: a rollout's reward against the mean of its group (DeepSeekMath, arXiv 2402.03300, section 4.1.1).

With ``scaling="none"`` it is the unbiased form without the division (Dr. GRPO, arXiv 2503.20783, section 3.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tasks.training.advantages.base import Advantages
from tasks.training.advantages.groups import RewardGroup, group_rows
from tasks.training.config import AdvantageConfig
from tasks.training.row import TrainingRow

EQUAL_REWARDS = 1e-6
"""Rewards whose spread is at most this fraction of the largest one are equal: what is left is rounding, and dividing it
by itself would make advantages of size 1 out of nothing."""


class GRPO:
    """Advantage (r - mean) / (std + epsilon) over the scored rollouts of the group, std with ddof 0, in float64.

    A group in which all scored rollouts are equal, or only one is scored, is dead: it leaves loss and denominators. The
    size of an advantage is at most sqrt(n - 1) for n scored rollouts.
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def estimate(self, rows: Sequence[TrainingRow]) -> Advantages:
        groups = group_rows(rows)
        values: list[np.ndarray] = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        excluded: list[str | None] = [None] * len(rows)
        num_groups: Counter[str] = Counter()
        num_dead: Counter[str] = Counter()
        for group in groups:
            scored = group.scored
            dead = is_dead(scored)
            num_groups[group.family] += bool(scored)
            num_dead[group.family] += bool(scored) and dead
            by_rollout = self._advantages(group)
            for index in group.rows:
                if rows[index].reward is None:
                    excluded[index] = "unscored"
                elif dead:
                    excluded[index] = "dead_group"
                else:
                    values[index][:] = by_rollout[rows[index].rollout_id]
        return Advantages(
            values_RT=values,
            excluded_R=excluded,
            num_groups=dict(num_groups),
            num_dead_groups=dict(num_dead),
            num_unscored=sum(reward is None for group in groups for reward in group.rewards.values()),
            num_rollouts=sum(len(group.rewards) for group in groups),
        )

    def _advantages(self, group: RewardGroup) -> dict[str, float]:
        scored = group.scored
        if is_dead(scored):
            return dict.fromkeys(group.rewards, 0.0)
        mean = math.fsum(scored) / len(scored)
        scale = 1.0
        if self.config.scaling == "group":
            scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / len(scored)) + self.config.epsilon
        return {
            rollout_id: 0.0 if reward is None else (reward - mean) / scale
            for rollout_id, reward in group.rewards.items()
        }


def is_dead(scored: Sequence[float]) -> bool:
    """Whether the scored rewards of a group hold nothing to learn from: fewer than two, or all equal."""
    if len(scored) < 2:
        return True
    return max(scored) - min(scored) <= EQUAL_REWARDS * max(abs(reward) for reward in scored)
