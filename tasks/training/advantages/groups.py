"""Who is compared with whom: groups of rollouts, a rollout counting once however many rows it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tasks.training.row import TrainingRow


@dataclass(slots=True)
class RewardGroup:
    """Sibling rollouts of one prompt and seed."""

    group_id: str
    family: str
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Final reward by rollout_id; None for an unscored one."""
    rows: list[int] = field(default_factory=list)
    """Indices of the group's rows."""

    @property
    def scored(self) -> list[float]:
        """Rewards of the scored rollouts: what every statistic is taken over."""
        return [reward for reward in self.rewards.values() if reward is not None]


def group_rows(rows: Sequence[TrainingRow]) -> list[RewardGroup]:
    """Groups in order of first appearance.

    Raises:
        ValueError: when rows of one rollout carry different rewards, or rows of one group different families.
    """
    groups: dict[str, RewardGroup] = {}
    for index, row in enumerate(rows):
        group = groups.setdefault(row.group_id, RewardGroup(row.group_id, row.family))
        if row.family != group.family:
            raise ValueError(f"group {row.group_id} holds rows of families {group.family!r} and {row.family!r}")
        known = group.rewards.setdefault(row.rollout_id, row.reward)
        if known != row.reward:
            raise ValueError(
                f"rollout {row.rollout_id} has rows with rewards {known} and {row.reward}; "
                "every row of a rollout carries its final reward"
            )
        group.rows.append(index)
    return list(groups.values())
