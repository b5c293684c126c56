"""From a batch manifest and its trajectories to the learner's rows."""

from __future__ import annotations

from resources.rollout.messages import Batch
from resources.trajectories.trajectory import Trajectory
from tasks.training.row import TrainingRow


def training_rows(batch: Batch, trajectories: list[Trajectory]) -> list[TrainingRow]:
    """One row a member, in the manifest's order, with the *final* reward that the manifest names (None: unscored).

    ``trajectories`` are the members' rows in the same order. Raises ValueError when a row is not the member's.
    """
    members = [(group, member) for group in batch.groups for member in group.members]
    if len(members) != len(trajectories):
        raise ValueError(
            f"batch {batch.version} names {len(members)} trajectories, the store returned {len(trajectories)}"
        )
    rows = []
    for (group, member), trajectory in zip(members, trajectories, strict=True):
        if trajectory.trajectory_id != member.trajectory_id:
            raise ValueError(
                f"batch {batch.version}: {member.ref} holds trajectory {trajectory.trajectory_id!r}, "
                f"the manifest says {member.trajectory_id!r}; the store and the manifest are of different runs"
            )
        rows.append(
            TrainingRow(
                token_ids=trajectory.token_ids,
                loss_mask=trajectory.loss_mask,
                behaviour_logprobs=trajectory.behaviour_logprobs,
                token_versions=trajectory.token_versions,
                temperature=trajectory.temperature,
                reward=member.reward,
                family=group.family,
                group_id=group.group_id,
                rollout_id=trajectory.rollout_id,
                trajectory_id=trajectory.trajectory_id,
                truncated=trajectory.truncated,
            )
        )
    return rows
