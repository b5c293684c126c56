"""The small deterministic pieces: masks, denominators, minibatches, schedule, configuration."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from pydantic import ValidationError

from tasks.training.advantages.base import AdvantageInputs
from tasks.training.config import AdvantageConfig, LossConfig, OptimizerConfig, TrainingConfig
from tasks.training.masks import TrainingMasks, derive_masks, is_beyond_bound, trainable_tokens
from tasks.training.minibatches import deal_minibatches
from tasks.training.normalisers import family_token_mean, sequence_mean, token_mean
from tasks.training.plugins import LOSSES, resolve
from tasks.training.row import TrainingRow
from tasks.training.schedule import learning_rate_at
from tests.unit.test_tasks_training_row import make_row


def masks_of(
    rows: list[TrainingRow],
    causes: list[str | None],
    version: int = 0,
    max_staleness: int | None = None,
    truncated_rows: Literal["train", "mask"] = "train",
) -> TrainingMasks:
    trainable = [trainable_tokens(row, version, max_staleness, truncated_rows) for row in rows]
    counted = [not is_beyond_bound(row, version, max_staleness) for row in rows]
    return derive_masks(AdvantageInputs(rows, trainable, counted), causes, truncated_rows)


def test_masked_tokens_are_counted_by_their_first_cause() -> None:
    rows = [
        make_row(0),
        make_row(1, version=3),
        make_row(2, truncated=True),
        make_row(3, version=2),
        make_row(4, version=4),
    ]
    masks = masks_of(rows, ["unscored", "dead_group", None, None, None], 5, 2, "mask")
    assert masks.masked_tokens == {"unscored": 3, "dead_group": 3, "truncated": 3, "stale": 3}
    assert [int(mask.sum()) for mask in masks.trained_RT] == [0, 0, 0, 0, 3]
    assert rows[3].loss_mask.sum() == 3, "stored masks are never rewritten"


def test_m19_truncated_rows_are_treated_as_the_configuration_says() -> None:
    """M19: a row that a limit cut is trained like any other, or masked; either way it is counted."""
    rows = [make_row(0, truncated=True)]
    kept, dropped = masks_of(rows, [None]), masks_of(rows, [None], truncated_rows="mask")
    assert (int(kept.trained_RT[0].sum()), kept.masked_tokens) == (3, {})
    assert (int(dropped.trained_RT[0].sum()), dropped.masked_tokens) == (0, {"truncated": 3})


def test_only_the_tokens_beyond_the_bound_are_stale() -> None:
    row = make_row(0)
    row.token_versions[5:8] = [1, 2, 3]
    masks = masks_of([row], [None], 4, 2)
    assert masks.trained_RT[0].nonzero()[0].tolist() == [6, 7]
    assert masks.masked_tokens == {"stale": 1}


def test_a_row_wholly_beyond_the_bound_is_masked_as_stale_though_its_group_is_dead_for_it() -> None:
    old, fresh = make_row(0, version=1), make_row(1, version=4)
    assert masks_of([old, fresh], ["dead_group"] * 2, 4, 2).masked_tokens == {"stale": 3, "dead_group": 3}


def test_denominators_by_hand() -> None:
    counts = np.array([1, 3, 4])
    families = ["maze", "maze", "sums"]
    assert token_mean(counts, families, 2).tolist() == [1 / 8] * 3
    assert sequence_mean(counts, families, 2).tolist() == [1 / 3, 1 / 9, 1 / 12]
    assert family_token_mean(counts, families, 2).tolist() == [1 / 8, 1 / 8, 1 / 8]
    assert family_token_mean(counts, families, 4).tolist() == [1 / 16, 1 / 16, 1 / 16]
    assert family_token_mean(np.array([2, 8]), ["maze", "sums"], 2).tolist() == [1 / 4, 1 / 16]


def test_minibatches_hold_their_share_of_every_family_and_repeat() -> None:
    families = ["maze"] * 10 + ["sums"] * 5 + ["code"] * 2
    dealt = deal_minibatches(families, 4, np.random.default_rng([7, 3, 0]))
    assert sorted(row for minibatch in dealt for row in minibatch) == list(range(17))
    assert sorted(len(minibatch) for minibatch in dealt) == [4, 4, 4, 5]
    for minibatch in dealt:
        assert sum(row < 10 for row in minibatch) in (2, 3)
        assert sum(10 <= row < 15 for row in minibatch) in (1, 2)
    assert dealt == deal_minibatches(families, 4, np.random.default_rng([7, 3, 0]))
    assert dealt != deal_minibatches(families, 4, np.random.default_rng([7, 4, 0]))


def test_fewer_rows_than_minibatches_give_fewer_steps() -> None:
    assert deal_minibatches(["maze"] * 2, 4, np.random.default_rng(0)) in ([[0], [1]], [[1], [0]])


def test_schedule_warms_up_then_falls_to_the_fraction_at_the_last_update() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_updates=4, final_fraction=0.2)
    assert [learning_rate_at(u, config, 9) for u in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate_at(4, config, 9) == 1.0
    assert learning_rate_at(6, config, 9) == pytest.approx(0.6)
    assert learning_rate_at(8, config, 9) == pytest.approx(0.2)
    assert learning_rate_at(50, config, 9) == pytest.approx(0.2)
    assert learning_rate_at(50, config, None) == 1.0
    assert learning_rate_at(
        4, OptimizerConfig(learning_rate=1.0, warmup_updates=4, total_updates=5), 99
    ) == pytest.approx(0.2)


def test_unknown_keys_and_names_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValidationError, match="learning_rat"):
        OptimizerConfig.model_validate({"learning_rat": 1e-3})
    with pytest.raises(
        ValidationError, match=r"training\.loss\.name is 'pppo'; allowed: ppo_clip, decoupled, .*kimi, or an import"
    ):
        LossConfig(name="pppo")
    with pytest.raises(ValidationError, match=r"training\.advantage\.estimator is 'gea'"):
        AdvantageConfig(estimator="gea")
    with pytest.raises(ValidationError, match=r"training\.normaliser is 'mean'"):
        TrainingConfig(normaliser="mean")
    with pytest.raises(ValidationError, match="betas"):
        OptimizerConfig(betas=(0.9, 1.0))


def test_a_loss_of_ones_own_plugs_in_by_import_path() -> None:
    path = "tests.unit.test_tasks_training_steps:FixedLoss"
    assert LossConfig(name=path).name == path
    assert resolve("training.loss.name", path, LOSSES).__name__ == "FixedLoss"
    with pytest.raises(ValueError, match="module 'nowhere' is not importable"):
        resolve("training.loss.name", "nowhere.at_all:Loss", LOSSES)
    with pytest.raises(ValueError, match="has no 'Absent'"):
        resolve("training.loss.name", "tests.unit.test_tasks_training_steps:Absent", LOSSES)
