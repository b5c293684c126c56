"""GDPO: several rewards, each normalised within its group before they are added (arXiv 2601.05242).

Adding first and normalising the sum lets the component with the largest spread decide alone, and makes different
combinations of components equal.
"""

from __future__ import annotations

import logging
from collections import defaultdict

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.groups import EQUAL_REWARDS, RewardGroup, assemble, group_rows, is_dead, spread
from tasks.training.advantages.grpo import centred, deviation
from tasks.training.algorithm_config import AdvantageConfig

logger = logging.getLogger(__name__)


class GDPO:
    """Sum over components k of weight_k (r_k - mean) / (std + epsilon) within the group; the sums of all rollouts of
    the batch are then brought to mean 0 and deviation 1. A group is dead when every component is equal in it.

    Components are the parts that a reward is the sum of, so one that a rollout does not name (no invalid action: no
    penalty for it) is 0 there. A penalty on the reward (KL) is no component, and is refused.
    """

    needs_components = True

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config
        self._missed: set[str] = set()

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        if any(inputs.penalty_of_row(index) for index in range(len(inputs.rows))):
            raise ValueError(
                "training.kl.place is 'reward', which gdpo cannot use: the penalty is no component of the reward; set "
                "it to 'loss'"
            )
        groups = group_rows(inputs)
        names = self._component_names(inputs)
        sums: dict[str, float] = {}
        dropped: set[str] = set()
        for group in groups:
            rewards = [
                (self._weight(name), self._component(inputs, group, name)) for name in names.get(group.family, [])
            ]
            live = [(weight, values) for weight, values in rewards if not is_dead(list(values.values()))]
            if not live:
                dropped.add(group.group_id)
                continue
            for weight, values in live:
                scale = deviation(list(values.values())) + self.config.epsilon
                for rollout_id, value in centred(dict(values), scale).items():
                    sums[rollout_id] = sums.get(rollout_id, 0.0) + weight * value
        # Components that cancel each other leave rounding behind, which is no deviation to divide by.
        scale = deviation(list(sums.values()))
        if scale > EQUAL_REWARDS * max(map(abs, self.config.component_weights.values()), default=1.0):
            sums = centred(dict(sums), scale)
        return assemble(inputs, groups, spread(inputs, groups, sums), dropped=frozenset(dropped))

    def _component_names(self, inputs: AdvantageInputs) -> dict[str, list[str]]:
        """By family, those that the configuration weighs, else all that a row of the family has."""
        weighed = set(self.config.component_weights)
        found: defaultdict[str, set[str]] = defaultdict(set)
        for row in inputs.rows:
            if not row.reward:
                continue  # unscored, or a sum of 0: nothing that components would have to explain
            if not row.reward_components:
                raise ValueError(
                    f"trajectory {row.trajectory_id} ({row.family}): its reward {row.reward:g} has no components, and "
                    "gdpo needs some; have the scorer or the environment give them, or choose another estimator"
                )
        for row in inputs.rows:
            if row.reward is not None:
                found[row.family] |= row.reward_components.keys()
        for family, names in found.items():
            if weighed and names and not weighed & names:
                raise ValueError(
                    f"the rewards of family {family} have the components {sorted(names)}, and "
                    f"training.advantage.component_weights weighs {sorted(weighed)}: name at least one of the former, "
                    "or have the scorer or the environment give the latter"
                )
        for name in sorted(weighed - set().union(*found.values()) - self._missed):
            self._missed.add(name)
            logger.warning(
                "no trajectory of this update has the reward component %r, which training.advantage.component_weights "
                "names: it counts 0",
                name,
            )
        return {family: sorted(weighed or names) for family, names in found.items()}

    def _weight(self, name: str) -> float:
        return self.config.component_weights.get(name, 1.0)

    @staticmethod
    def _component(inputs: AdvantageInputs, group: RewardGroup, name: str) -> dict[str, float]:
        return {
            rollout_id: float(inputs.rows[group.rows[rollout_id][0]].reward_components.get(name, 0.0))
            for rollout_id, reward in group.rewards.items()
            if reward is not None
        }
