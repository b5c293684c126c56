"""Advantages over tokens and families: whitening, and task advantage normalisation. M22."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.training.advantages.base import AdvantageInputs
from tasks.training.advantages.whitening import whiten
from tasks.training.algorithm_config import (
    AdvantageConfig,
)
from tasks.training.algorithms import Algorithms
from tasks.training.config import LossConfig, OptimizerConfig, TrainingConfig
from tasks.training.learner import Learner
from tasks.training.row import TrainingRow
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import make_row


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("chosen", "expected"), [([], [5.0, 1.0, 3.0]), ([1], [5.0, 1.0, 3.0]), ([1, 2], [5.0, -1.0, 1.0])]
)
def test_m22_whitening_over_0_1_and_2_tokens(chosen: list[int], expected: list[float]) -> None:
    """M22: nothing to divide by for 0 and 1: unchanged; right for 2. What is not chosen is never touched."""
    mask = np.isin(np.arange(3), chosen)
    (values,) = whiten([np.array([5.0, 1.0, 3.0], np.float32)], [mask])
    assert values.tolist() == expected


def test_m22_equal_values_become_zero_and_rounding_is_not_divided() -> None:
    values = np.array([0.3, 0.1 + 0.2, np.float32(0.3)], np.float32)
    assert whiten([values], [np.ones(3, np.bool_)])[0].tolist() == [0.0, 0.0, 0.0]


def scaled_rows(scales: dict[str, float]) -> list[TrainingRow]:
    rows = []
    for number, (family, scale) in enumerate(scales.items()):
        for group in range(2):
            for member in range(4):
                index = 100 * number + 4 * group + member
                reward = scale * (0.3 * member + 0.5 * group * (member % 2))
                row = make_row(index, length=14, trained=tuple(range(4, 6 + member)), reward=reward, family=family)
                rows.append(replace(row, group_id=f"{family}-{group}", rollout_id=f"{family}-{index}"))
    return rows


def test_task_advantage_normalisation_is_mean_0_and_deviation_1_by_family_whatever_the_scale() -> None:
    """AgentRL: over the token-level advantages of the family; unscored and masked tokens are in no statistic."""
    algorithms = Algorithms(TrainingConfig(advantage=AdvantageConfig(scaling="none", normalisation="family")))
    found = {}
    for factor in (1.0, 1000.0):
        rows = scaled_rows({"maze": 0.1 * factor, "sums": 10.0 * factor})
        rows[3] = replace(rows[3], reward=None)
        inputs = AdvantageInputs.of(rows)
        inputs.trainable_RT[0][:] = False
        result = algorithms.estimate(inputs)
        for family in ("maze", "sums"):
            tokens = np.concatenate(
                [
                    values[mask]
                    for row, values, mask in zip(rows, result.values_RT, inputs.trainable_RT, strict=True)
                    if row.family == family and row.reward is not None
                ]
            ).astype(np.float64)
            assert abs(tokens.mean()) < 1e-6 and tokens.std() == pytest.approx(1.0, abs=1e-6)
        found[factor] = np.concatenate([v[m] for v, m in zip(result.values_RT, inputs.trainable_RT, strict=True)])
    assert found[1000.0].tolist() == pytest.approx(found[1.0].tolist(), rel=1e-4, abs=1e-5)


def gradient_norms(directory: Path, rows: list[TrainingRow], normalisation: str) -> dict[str, float]:
    norms = {}
    for family in ("maze", "sums", "code"):
        learner = Learner(
            directory,
            TrainingConfig(
                advantage=AdvantageConfig.model_validate({"scaling": "none", "normalisation": normalisation}),
                loss=LossConfig(name="policy_gradient"),
                optimizer=OptimizerConfig(max_grad_norm=1e9),
                minibatches=1,
            ),
            seed=0,
        )
        of_family = [row for row in rows if row.family == family]
        norms[family] = learner.update(of_family, 0, num_families=3).metrics["grad_norm"]
    return norms


def test_reward_scales_stop_mattering_between_families(directory: Path) -> None:
    """Rewards x0.1, x1, x10: gradient norms of the families 100 apart without, near 1 with, normalisation by family."""
    rows = scaled_rows({"maze": 0.1, "sums": 1.0, "code": 10.0})
    plain, normalised = (gradient_norms(directory, rows, each) for each in ("none", "family"))
    assert max(plain.values()) / min(plain.values()) > 30
    assert max(normalised.values()) / min(normalised.values()) < 2
