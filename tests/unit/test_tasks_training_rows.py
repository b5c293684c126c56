"""From trajectories to the learner's rows: what was sampled otherwise than the learner computes is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from resources.policy.chat_format import ChatFormat
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy
from resources.rollout.messages import Batch, BatchGroup, BatchMember
from resources.trajectories.trajectory import Trajectory, TrajectoryRef
from tasks.training.config import TrainingConfig
from tasks.training.rank import LearnerSettings, read_tokenizer_hash
from tasks.training.rows import training_rows
from tests.trajectory_factory import make_trajectory


def batch_of(*trajectories: Trajectory) -> Batch:
    members = tuple(
        BatchMember(each.trajectory_id, TrajectoryRef("f", place), 0.5, True, "environment", "1", 0)
        for place, each in enumerate(trajectories)
    )
    return Batch("run", 0, (BatchGroup("calculator-000007", "calculator", 7, members),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9}, r"trajectory '.*' was sampled with top_p 0\.9 and top_k 0; .*its ratios would be wrong"),
        ({"top_k": 20}, r"was sampled with top_p 1\.0 and top_k 20"),
        ({"tokenizer_hash": "t1"}, "written with tokenizer t1, the learner's policy has t0: the same ids are other"),
        ({"trajectory_id": "run/calculator-000007/9/0"}, "the manifest says"),
    ],
)
def test_what_means_something_else_to_the_learner_is_refused(changes: dict, message: str) -> None:
    """M11: log-probabilities of a truncated distribution are not those of the whole one."""
    good = make_trajectory(0)
    assert len(training_rows(batch_of(good), [good], tokenizer_hash="t0")) == 1
    with pytest.raises(ValueError, match=message):
        training_rows(batch_of(good), [make_trajectory(0, **changes)], tokenizer_hash="t0")


def test_a_batch_of_fewer_trajectories_than_members_is_refused() -> None:
    first, second = make_trajectory(0), make_trajectory(1)
    with pytest.raises(ValueError, match="names 2 trajectories, the store returned 1"):
        training_rows(batch_of(first, second), [first])


def test_a_trajectory_that_is_named_twice_is_refused() -> None:
    """It would weigh twice in its group and be trained twice."""
    one = make_trajectory(0)
    with pytest.raises(ValueError, match=rf"batch 0 names trajectory '{one.trajectory_id}' twice"):
        training_rows(batch_of(one, one), [one, one])


def test_each_sequence_is_a_row_with_its_own_positions() -> None:
    """The tail behind the last action, a history read anew that nothing was sampled after, is no row."""
    trajectory = make_trajectory(0, sequence_starts=[5])
    first, second = training_rows(batch_of(trajectory), [trajectory])
    np.testing.assert_array_equal(np.concatenate([first.token_ids, second.token_ids]), trajectory.token_ids)
    assert [(turn.observation_start, turn.action_start, turn.action_end) for turn in first.turns] == [(0, 3, 5)]
    assert [(turn.observation_start, turn.action_start, turn.action_end) for turn in second.turns] == [(0, 1, 5)]
    assert first.rollout_id == second.rollout_id and first.reward == second.reward == 0.5
    for row in (first, second):
        row.validate(version=12, vocabulary_size=2000)
    ends_rewritten = make_trajectory(0)
    ends_rewritten.loss_mask[8:], ends_rewritten.turns[1].action_end = False, 8
    ends_rewritten.sequence_starts = [8]
    (only,) = training_rows(batch_of(ends_rewritten), [ends_rewritten])
    assert len(only.token_ids) == 8


def test_a_trajectory_without_a_sampled_token_is_one_row_with_nothing_to_train() -> None:
    """M23"""
    nothing = make_trajectory(0, turns=[], loss_mask=np.zeros(10, np.bool_))
    (row,) = training_rows(batch_of(nothing), [nothing])
    assert not row.loss_mask.any() and row.turns == ()
    rewritten = make_trajectory(0, loss_mask=np.zeros(10, np.bool_), sequence_starts=[5])
    assert len(training_rows(batch_of(rewritten), [rewritten])) == 1, "answers without a token, between histories"


def test_the_learner_knows_its_tokenizer_as_the_rollouts_do(tmp_path: Path) -> None:
    sizes = PolicyConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16)
    directory = create_tiny_policy(tmp_path / "policy", sizes, ["Go left or right."] * 10, seed=0)

    def settings(directory: Path, **training: object) -> LearnerSettings:
        return LearnerSettings({}, TrainingConfig.model_validate(training).model_dump(), str(directory), 0, 1, 1, 1)

    assert read_tokenizer_hash(settings(directory)) == ChatFormat.from_directory(directory).tokenizer_hash
    assert read_tokenizer_hash(settings(directory, backend="simulated")) is None
    assert read_tokenizer_hash(settings(tmp_path)) is None, "weights alone: nothing to compare with"
