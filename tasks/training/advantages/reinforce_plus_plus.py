"""REINFORCE++: advantages normalised over the whole batch instead of the group (arXiv 2501.03262, section 3).

The plain form needs no siblings: a token's return is the rollout's reward less the penalties from that token on. The
baseline form subtracts the mean of the group first. Both then become mean 0 and deviation 1 over all trained tokens.
"""

from __future__ import annotations

import numpy as np

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.groups import assemble, dead_groups, group_rows, spread
from tasks.training.advantages.grpo import centred
from tasks.training.advantages.whitening import whiten
from tasks.training.algorithm_config import AdvantageConfig


class ReinforcePlusPlus:
    """Whitened return to go. A group of equal rewards is trained all the same: it is compared with the batch."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        groups = group_rows(inputs)
        rewards = {name: reward for group in groups for name, reward in group.rewards.items() if reward is not None}
        values = spread(inputs, groups, rewards)
        if inputs.penalty_RT is not None:
            # `rewards` are less the whole penalty; what was paid before a token is not its doing.
            for group in groups:
                for indices in group.rows.values():
                    paid = 0.0
                    for index in indices:
                        penalty = inputs.penalty_RT[index].astype(np.float64)
                        values[index] += (paid + np.cumsum(penalty) - penalty).astype(np.float32)
                        paid += penalty.sum()
        counted = _counted_tokens(inputs)
        return assemble(inputs, groups, whiten(values, counted), dropped=frozenset())


class ReinforcePlusPlusBaseline:
    """Whitened (r - mean of the group). Dead groups leave loss and statistics."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        groups = group_rows(inputs)
        dead = dead_groups(groups)
        advantages: dict[str, float] = {}
        for group in groups:
            if group.group_id not in dead:
                advantages |= centred(group.rewards)
        counted = _counted_tokens(inputs, dead)
        return assemble(inputs, groups, whiten(spread(inputs, groups, advantages), counted), dropped=dead)


def _counted_tokens(inputs: AdvantageInputs, dropped: frozenset[str] = frozenset()) -> list[np.ndarray]:
    """bool [T]: tokens that will be trained."""
    return [
        mask & (row.reward is not None and row.group_id not in dropped)
        for row, mask in zip(inputs.rows, inputs.trainable_RT, strict=True)
    ]
