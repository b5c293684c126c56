"""GiGPO: beside the episode's advantage one for each step, among turns that met the same state (arXiv 2505.10978,
section 4).

The siblings of a group start from one state and often meet again: an observation that several turns of the group have
read is an anchor, and the actions taken there are compared by their discounted returns. The state is known by the token
ids between two actions alone; at the start of a sequence (the first turn, or a rewritten history) these are the whole
conversation so far, so turns behind a rewritten history meet only where all of it is alike.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.episodes import EpisodeTurn, discounted_returns, episode_turns, observation_of
from tasks.training.advantages.groups import RewardGroup, assemble, group_rows, is_dead
from tasks.training.advantages.grpo import centred, deviation
from tasks.training.algorithm_config import AdvantageConfig


class GiGPO:
    """Advantage of a turn: episode's + step_weight * step's, each (x - mean) / (std + epsilon), or undivided.

    A turn whose observation no other turn of the group has read has step advantage 0. A group is dead when every
    advantage in it is 0; with a discount, a group in which all succeed, sooner or later, is not.
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        groups = group_rows(inputs)
        values = [np.zeros(len(row.token_ids), np.float32) for row in inputs.rows]
        dropped = frozenset(group.group_id for group in groups if not self._fill(inputs, group, values))
        return assemble(inputs, groups, values, dropped=dropped)

    def _fill(self, inputs: AdvantageInputs, group: RewardGroup, values: list[np.ndarray]) -> bool:
        """Write the group's advantages; False when all of them are 0."""
        if len(group.scored) < 2:
            return False
        of_episode = {} if group.is_dead else self._normalised(dict(group.rewards))
        anchors: defaultdict[bytes, list[tuple[EpisodeTurn, float, str]]] = defaultdict(list)
        for rollout_id, indices in group.rows.items():
            final = inputs.rows[indices[0]].reward
            if group.rewards[rollout_id] is None or final is None:
                continue
            turns = episode_turns(inputs, indices, final, "gigpo")
            returns = discounted_returns([turn.reward for turn in turns], self.config.discount)
            for turn, value in zip(turns, returns, strict=True):
                anchors[observation_of(inputs.rows[turn.row], turn.span)].append((turn, value, rollout_id))
        has_signal = bool(of_episode)
        for met in anchors.values():
            of_step: dict[str, float] = {}
            if not is_dead([value for _, value, _ in met]):
                of_step = self._normalised({str(number): value for number, (_, value, _) in enumerate(met)})
                has_signal = has_signal or self.config.step_weight > 0
            for number, (turn, _, rollout_id) in enumerate(met):
                advantage = of_episode.get(rollout_id, 0.0) + self.config.step_weight * of_step.get(str(number), 0.0)
                values[turn.row][turn.span.action_start : turn.span.action_end] = advantage
        return has_signal

    def _normalised(self, returns: dict[str, float | None]) -> dict[str, float]:
        scale = 1.0
        if self.config.scaling == "group":
            scale = deviation([value for value in returns.values() if value is not None]) + self.config.epsilon
        return centred(returns, scale)
