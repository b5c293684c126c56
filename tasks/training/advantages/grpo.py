"""GRPO: a rollout's reward against the mean of its group (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

With ``scaling="none"`` it is the unbiased form without the division (Dr. GRPO, arXiv 2503.20783, section 3); with
``scaling="batch"`` the mean is the group's and the deviation that of all rewards (Lite PPO, arXiv 2508.08221).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.groups import assemble, dead_groups, group_rows, spread
from tasks.training.algorithm_config import AdvantageConfig


class GRPO:
    """Advantage (r - mean) / (std + epsilon) over the scored rollouts of the group, std with ddof 0, in float64.

    A group in which all scored rollouts are equal, or only one is scored, is dead: it leaves loss and denominators. The
    size of an advantage is at most sqrt(n - 1) for n scored rollouts (with ``scaling="group"``).
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        groups = group_rows(inputs)
        scale = 1.0
        if self.config.scaling == "batch":
            scale = deviation([reward for group in groups for reward in group.scored]) + self.config.epsilon
        advantages: dict[str, float] = {}
        for group in groups:
            if group.is_dead:
                continue
            if self.config.scaling == "group":
                scale = deviation(group.scored) + self.config.epsilon
            advantages |= centred(group.rewards, scale)
        return assemble(inputs, groups, spread(inputs, groups, advantages), dropped=dead_groups(groups))


def centred(rewards: dict[str, float | None], scale: float = 1.0) -> dict[str, float]:
    """(reward - mean of those that are scored) / scale, for those that are scored."""
    scored = {rollout_id: reward for rollout_id, reward in rewards.items() if reward is not None}
    mean = math.fsum(scored.values()) / len(scored)
    return {rollout_id: (reward - mean) / scale for rollout_id, reward in scored.items()}


def deviation(values: Sequence[float]) -> float:
    """Standard deviation with ddof 0; 0 for none or one."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
