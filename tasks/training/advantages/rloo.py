"""RLOO: a rollout's reward against the mean of the others of its group (Kool et al., "Buy 4 REINFORCE samples, get a
baseline for free!", 2019; for language models arXiv 2402.14740)."""

from __future__ import annotations

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.groups import assemble, dead_groups, group_rows, spread
from tasks.training.advantages.grpo import centred
from tasks.training.algorithm_config import AdvantageConfig


class RLOO:
    """Advantage r - mean of the other n - 1 scored rollouts, which is n / (n - 1) (r - mean of all). No scaling."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        groups = group_rows(inputs)
        advantages: dict[str, float] = {}
        for group in groups:
            if not group.is_dead:
                n = len(group.scored)
                advantages |= centred(group.rewards, scale=(n - 1) / n)
        return assemble(inputs, groups, spread(inputs, groups, advantages), dropped=dead_groups(groups))
