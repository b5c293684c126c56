"""From a batch manifest and its trajectories to the learner's rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from resources.rollout.messages import Batch
from resources.trajectories.trajectory import Trajectory
from tasks.training.row import TrainingRow, TurnSpan


def training_rows(
    batch: Batch,
    trajectories: list[Trajectory],
    pool_components: Mapping[str, Mapping[str, float]] | None = None,
    tokenizer_hash: str | None = None,
) -> list[TrainingRow]:
    """The rows of each member, in the manifest's order, with the *final* reward that the manifest names (None:
    unscored). A member has one row, or several when the chat template rewrote its history: one a token sequence. They
    share their rollout, so they count once.

    ``trajectories`` are the members' rows in the same order; ``pool_components`` holds, by trajectory, the reward
    components of those that the reward pool judged (None: not read). ``tokenizer_hash``: of the learner's policy (None:
    not compared).

    Raises ValueError when a row is not the member's, a trajectory is named twice, a row was written in ids of another
    tokenizer, or was sampled from a truncated distribution, whose log-probabilities the learner does not compute.
    """
    members = [(group, member) for group in batch.groups for member in group.members]
    if len(members) != len(trajectories):
        raise ValueError(
            f"batch {batch.version} names {len(members)} trajectories, the store returned {len(trajectories)}"
        )
    names = Counter(member.trajectory_id for _, member in members)
    if twice := [name for name, number in names.items() if number > 1]:
        raise ValueError(
            f"batch {batch.version} names trajectory {twice[0]!r} twice, and a trajectory is trained once; "
            "its manifest is not as the group queue writes it"
        )
    rows = []
    for (group, member), trajectory in zip(members, trajectories, strict=True):
        if trajectory.trajectory_id != member.trajectory_id:
            raise ValueError(
                f"batch {batch.version}: {member.ref} holds trajectory {trajectory.trajectory_id!r}, "
                f"the manifest says {member.trajectory_id!r}; the store and the manifest are of different runs"
            )
        _check_sampled_alike(trajectory, tokenizer_hash)
        components = (pool_components or {}).get(trajectory.trajectory_id, trajectory.reward_components)
        rows.extend(
            TrainingRow(
                token_ids=trajectory.token_ids[start:end],
                loss_mask=trajectory.loss_mask[start:end],
                behaviour_logprobs=trajectory.behaviour_logprobs[start:end],
                token_versions=trajectory.token_versions[start:end],
                temperature=trajectory.temperature,
                reward=member.reward,
                family=group.family,
                group_id=group.group_id,
                rollout_id=trajectory.rollout_id,
                trajectory_id=trajectory.trajectory_id,
                truncated=trajectory.truncated,
                turns=tuple(
                    TurnSpan(
                        turn.observation_start - start, turn.action_start - start, turn.action_end - start, turn.reward
                    )
                    for turn in trajectory.turns
                    if start <= turn.observation_start and turn.action_end <= end
                ),
                reward_components=components,
            )
            for start, end in _trained_sequences(trajectory)
        )
    return rows


def _check_sampled_alike(trajectory: Trajectory, tokenizer_hash: str | None) -> None:
    """Ids and log-probabilities must mean to the learner what they meant to the engine."""
    where = f"trajectory {trajectory.trajectory_id!r}"
    if trajectory.top_p != 1.0 or trajectory.top_k != 0:
        raise ValueError(
            f"{where} was sampled with top_p {trajectory.top_p} and top_k {trajectory.top_k}; the learner computes "
            "log-probabilities of the whole distribution, so its ratios would be wrong: sample with top_p 1.0 and "
            "top_k 0"
        )
    if tokenizer_hash is not None and trajectory.tokenizer_hash != tokenizer_hash:
        raise ValueError(
            f"{where} was written with tokenizer {trajectory.tokenizer_hash[:12]}, the learner's policy has "
            f"{tokenizer_hash[:12]}: the same ids are other words; engines and learner must load one model directory"
        )


def _trained_sequences(trajectory: Trajectory) -> list[tuple[int, int]]:
    """[start, end) of the sequences in which something was sampled; the first one when there is none (M23)."""
    sequences = trajectory.sequences
    return [span for span in sequences if trajectory.loss_mask[span[0] : span[1]].any()] or sequences[:1]


def generation_seconds(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean engine seconds of one trajectory by family, ``prefill_s/<family>`` and ``decode_s/<family>``: what decides
    the hardware class of a family (prefill wants compute, decode wants memory bandwidth)."""
    sums: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        counts[trajectory.family] += 1
        for turn in trajectory.turns:
            sums[f"prefill_s/{trajectory.family}"] += turn.prefill_s
            sums[f"decode_s/{trajectory.family}"] += turn.decode_s
    return {name: value / counts[name.split("/", 1)[1]] for name, value in sums.items()}
