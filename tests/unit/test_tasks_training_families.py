"""Families that share an advantage section share its statistics, whatever else they do otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.algorithm_config import AdvantageConfig, CorrectionConfig, FamilyTrainingConfig, KLConfig
from tasks.training.algorithms import Algorithms
from tasks.training.config import LossConfig, TrainingConfig
from tasks.training.row import TrainingRow
from tests.unit.test_tasks_training_row import make_row

SHARED: dict[str, dict[str, Any]] = {
    "batch scaling": {"scaling": "batch"},
    "batch normalisation": {"scaling": "none", "normalisation": "batch"},
    "reinforce_plus_plus": {"estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"estimator": "reinforce_plus_plus_baseline"},
    "gdpo": {"estimator": "gdpo"},
}
OTHERWISE = {
    "loss": FamilyTrainingConfig(loss=LossConfig(name="cispo")),
    "corrections": FamilyTrainingConfig(corrections=(CorrectionConfig(name="m2po"),)),
    "kl": FamilyTrainingConfig(kl=KLConfig(coefficient=0.1)),
}


def two_families() -> list[TrainingRow]:
    """Rewards of one family ten times those of the other, lengths that differ."""
    rows = []
    for number, (family, scale) in enumerate((("maze", 1.0), ("sums", 10.0))):
        for member in range(4):
            trained = tuple(range(4, 6 + member))
            row = make_row(4 * number + member, trained=trained, family=family, group=family, reward=scale * member**2)
            row.reward_components.update(outcome=scale * member, format=float(member % 2))  # type: ignore[attr-defined]
            rows.append(row)
    return rows


def estimate(config: TrainingConfig) -> Advantages:
    return Algorithms(config).estimate(AdvantageInputs.of(two_families()))


@pytest.mark.parametrize("advantage", SHARED)
@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_a_family_with_another_loss_stays_in_the_statistics_of_the_batch(advantage: str, otherwise: str) -> None:
    section = AdvantageConfig(**SHARED[advantage])
    alike = estimate(TrainingConfig(advantage=section))
    apart = estimate(TrainingConfig(advantage=section, families={"sums": OTHERWISE[otherwise]}))
    for expected, found in zip(alike.values_RT, apart.values_RT, strict=True):
        np.testing.assert_array_equal(expected, found)
    assert apart.num_groups == alike.num_groups


def test_a_family_with_another_advantage_section_has_statistics_of_its_own() -> None:
    section = AdvantageConfig(estimator="reinforce_plus_plus")
    own = FamilyTrainingConfig(advantage=AdvantageConfig(estimator="reinforce_plus_plus", normalisation="batch"))
    alike = estimate(TrainingConfig(advantage=section))
    apart = estimate(TrainingConfig(advantage=section, families={"sums": own}))
    rows = two_families()
    maze = np.concatenate(
        [v[r.loss_mask] for v, r in zip(apart.values_RT, rows, strict=True) if r.family == "maze"]
    ).astype(np.float64)
    assert abs(maze.mean()) < 1e-6 and maze.std() == pytest.approx(1.0, abs=1e-6)
    assert float(alike.values_RT[0][4]) != pytest.approx(float(apart.values_RT[0][4]), abs=0.1)


@pytest.mark.parametrize("weight", [1.0, -1.0, 1000.0])
@pytest.mark.parametrize("costs", [[0.0, 1.0], [0.1, 0.7, 0.3]])
def test_gdpo_leaves_components_that_cancel_at_zero(costs: list[float], weight: float) -> None:
    """Whatever the sign of their weights, and though rounding leaves a little of some."""
    rows = [make_row(member, reward=0.0) for member in range(len(costs))]
    for cost, row in zip(costs, rows, strict=True):
        row.reward_components.update(cost=cost, length=1.0 - cost)  # type: ignore[attr-defined]
    section = AdvantageConfig(estimator="gdpo", component_weights={"cost": weight, "length": weight})
    result = Algorithms(TrainingConfig(advantage=section)).estimate(AdvantageInputs.of(rows))
    assert max(abs(float(values[5])) for values in result.values_RT) < 1e-9
