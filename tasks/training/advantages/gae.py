"""Generalised advantage estimation with a critic (arXiv 1506.02438, equation 16), over the sampled tokens of a rollout.

What the environment says between two actions is no step: the value after the last token of a turn is that before the
first token of the next one.
"""

from __future__ import annotations

import numpy as np

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.episodes import episode_turns
from tasks.training.advantages.groups import assemble, group_rows
from tasks.training.algorithm_config import AdvantageConfig


class GAE:
    """A_t = sum over k of (discount * lambda)^k delta_(t+k), delta_t = r_t + discount V_(t+1) - V_t.

    The reward of a turn falls on its last sampled token, the rest of the final reward on the rollout's last; the value
    behind the last token is 0, also where a limit cut the episode. Nothing is compared within groups, so no group is
    dropped. Returns for the critic are A_t + V_t.
    """

    needs_critic = True

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        if inputs.values_RT is None:
            raise ValueError(
                "training.advantage.estimator 'gae' needs the values of a critic, and there are none; "
                "set training.critic"
            )
        groups = group_rows(inputs)
        values = [np.zeros(len(row.token_ids), np.float32) for row in inputs.rows]
        returns = [np.zeros(len(row.token_ids), np.float32) for row in inputs.rows]
        for group in groups:
            for rollout_id, indices in group.rows.items():
                final = inputs.rows[indices[0]].reward
                if group.rewards[rollout_id] is None or final is None:
                    continue
                places = [(index, t) for index in indices for t in inputs.rows[index].loss_mask.nonzero()[0].tolist()]
                if not places:
                    continue
                rewards = token_rewards(inputs, indices, final)
                before = [float(inputs.values_RT[index][t]) for index, t in places]
                advantages = generalised_advantages(rewards, before, self.config.discount, self.config.gae_lambda)
                for (index, t), advantage, value in zip(places, advantages, before, strict=True):
                    values[index][t] = advantage
                    returns[index][t] = advantage + value
        return assemble(inputs, groups, values, dropped=frozenset(), returns_RT=returns)


def generalised_advantages(
    rewards: list[float], values: list[float], discount: float, trace_decay: float
) -> list[float]:
    """One advantage per step of an episode that ends behind the last one."""
    advantages = [0.0] * len(rewards)
    later = next_value = 0.0
    for step in range(len(rewards) - 1, -1, -1):
        delta = rewards[step] + discount * next_value - values[step]
        later = delta + discount * trace_decay * later
        advantages[step] = later
        next_value = values[step]
    return advantages


def token_rewards(inputs: AdvantageInputs, indices: list[int], final_reward: float) -> list[float]:
    """Reward of each sampled token of a rollout, its rows one behind the other."""
    sampled = {index: inputs.rows[index].loss_mask.nonzero()[0] for index in indices}
    first: dict[int, int] = {}
    rewards: list[float] = []
    for index in indices:
        first[index] = len(rewards)
        penalty = None if inputs.penalty_RT is None else inputs.penalty_RT[index]
        rewards += [0.0 if penalty is None else -float(penalty[t]) for t in sampled[index]]
    if any(not inputs.rows[index].turns and len(sampled[index]) for index in indices):
        rewards[-1] += final_reward
        return rewards
    inline = 0.0
    for turn in episode_turns(inputs, indices, final_reward, "gae"):
        # A turn without a token of its own is credited to the token before it, or to the rollout's first.
        num_before = first[turn.row] + int(np.searchsorted(sampled[turn.row], turn.span.action_end))
        rewards[max(0, num_before - 1)] += turn.span.reward
        inline += turn.span.reward
    rewards[-1] += final_reward - inline
    return rewards
