"""Who is compared with whom: groups of rollouts, a rollout counting once however many rows it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tasks.training.advantages.base import AdvantageInputs, Advantages

EQUAL_REWARDS = 1e-6
"""Rewards whose spread is at most this fraction of the largest one are equal: what is left is rounding, and dividing it
by itself would make advantages of size 1 out of nothing."""


@dataclass(slots=True)
class RewardGroup:
    """Sibling rollouts of one prompt and seed."""

    group_id: str
    family: str
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By rollout_id: final reward less its penalty; None for one that is in no statistic (unscored, or wholly beyond
    the staleness bound)."""
    rows: dict[str, list[int]] = field(default_factory=dict)
    """By rollout_id: indices of its rows, in order."""

    @property
    def scored(self) -> list[float]:
        """Rewards of the rollouts that count: what every statistic is taken over."""
        return [reward for reward in self.rewards.values() if reward is not None]

    @property
    def is_dead(self) -> bool:
        return is_dead(self.scored)


def group_rows(inputs: AdvantageInputs) -> list[RewardGroup]:
    """Groups in order of first appearance.

    Raises:
        ValueError: when rows of one rollout carry different rewards, or rows of one group different families.
    """
    groups: dict[str, RewardGroup] = {}
    for index, row in enumerate(inputs.rows):
        group = groups.setdefault(row.group_id, RewardGroup(row.group_id, row.family))
        if row.family != group.family:
            raise ValueError(f"group {row.group_id} holds rows of families {group.family!r} and {row.family!r}")
        siblings = group.rows.setdefault(row.rollout_id, [])
        if siblings and inputs.rows[siblings[0]].reward != row.reward:
            raise ValueError(
                f"rollout {row.rollout_id} has rows with rewards {inputs.rows[siblings[0]].reward} and {row.reward}; "
                "every row of a rollout carries its final reward"
            )
        siblings.append(index)
    for group in groups.values():
        for rollout_id, indices in group.rows.items():
            reward = inputs.rows[indices[0]].reward
            counts = reward is not None and any(inputs.counted_R[index] for index in indices)
            penalty = sum(inputs.penalty_of_row(index) for index in indices)
            group.rewards[rollout_id] = reward - penalty if counts and reward is not None else None
    return list(groups.values())


def is_dead(scored: Sequence[float]) -> bool:
    """Whether the scored rewards of a group hold nothing to learn from: fewer than two, or all equal."""
    if len(scored) < 2:
        return True
    return max(scored) - min(scored) <= EQUAL_REWARDS * max(abs(reward) for reward in scored)


def spread(inputs: AdvantageInputs, groups: Sequence[RewardGroup], of_rollout: Mapping[str, float]) -> list[np.ndarray]:
    """One advantage per rollout, at every token of its rows; 0 for rollouts that are not named. float32 [T] each."""
    values = [np.zeros(len(row.token_ids), np.float32) for row in inputs.rows]
    for group in groups:
        for rollout_id, indices in group.rows.items():
            for index in indices:
                values[index][:] = of_rollout.get(rollout_id, 0.0)
    return values


def assemble(
    inputs: AdvantageInputs,
    groups: Sequence[RewardGroup],
    values_RT: list[np.ndarray],
    *,
    dropped: frozenset[str],
    returns_RT: Sequence[np.ndarray | None] | None = None,
) -> Advantages:
    """Advantages with the counts of groups. Rows of the groups in ``dropped`` leave the loss, as do unscored ones."""
    excluded: list[str | None] = [None] * len(inputs.rows)
    num_groups: Counter[str] = Counter()
    num_dead: Counter[str] = Counter()
    unscored: set[str] = set()
    for group in groups:
        num_groups[group.family] += bool(group.scored)
        num_dead[group.family] += bool(group.scored) and group.is_dead
        for rollout_id, indices in group.rows.items():
            for index in indices:
                if inputs.rows[index].reward is None:
                    excluded[index] = "unscored"
                    unscored.add(rollout_id)
                elif group.group_id in dropped:
                    excluded[index] = "dead_group"
    for values, cause in zip(values_RT, excluded, strict=True):
        if cause is not None:
            values[:] = 0.0
    return Advantages(
        values_RT=values_RT,
        excluded_R=excluded,
        num_groups=dict(num_groups),
        num_dead_groups=dict(num_dead),
        num_unscored=len(unscored),
        num_rollouts=sum(len(group.rows) for group in groups),
        returns_RT=returns_RT,
    )


def dead_groups(groups: Sequence[RewardGroup]) -> frozenset[str]:
    return frozenset(group.group_id for group in groups if group.is_dead)
