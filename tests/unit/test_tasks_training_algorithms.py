"""Algorithms by family, who is in no statistic, and what plugs in."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.groups import assemble, group_rows, spread
from tasks.training.algorithm_config import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    FamilyTrainingConfig,
    KLConfig,
)
from tasks.training.algorithms import Algorithms
from tasks.training.config import LossConfig, TrainingConfig
from tasks.training.corrections.base import CorrectionInputs
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.plugins import ESTIMATORS
from tasks.training.row import TrainingRow, TurnSpan
from tests.unit.test_tasks_training_learner import make_batch, make_learner
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import make_row


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def with_turns(row: TrainingRow) -> TrainingRow:
    """One turn over all that was sampled, and two reward components."""
    sampled = row.loss_mask.nonzero()[0]
    first, end = (int(sampled[0]), int(sampled[-1]) + 1) if sampled.size else (1, 1)
    components = {"outcome": row.reward or 0.0, "format": -0.1 * (len(row.token_ids) % 2)}
    return replace(row, turns=(TurnSpan(0, first, end),), reward_components=components)


def test_a_familys_own_algorithm_is_used_for_its_rows_alone() -> None:
    config = TrainingConfig(
        families={"sums": FamilyTrainingConfig(advantage=AdvantageConfig(estimator="rloo"))},
    )
    rows = [
        *(make_row(i, reward=float(i % 2), family="maze", group="maze-0") for i in range(4)),
        *(make_row(i, reward=float(i % 2), family="sums", group="sums-0") for i in range(4)),
    ]
    result = Algorithms(config).estimate(AdvantageInputs.of(rows))
    assert [float(values[5]) for values in result.values_RT] == pytest.approx(
        [*[-1.0, 1.0] * 2, *[-2 / 3, 2 / 3] * 2], rel=1e-3
    )
    assert result.num_groups == {"maze": 1, "sums": 1}


def test_families_that_share_a_configuration_share_their_statistics() -> None:
    same = AdvantageConfig(scaling="batch")
    config = TrainingConfig(advantage=same, families={"sums": FamilyTrainingConfig(advantage=same, weight=2.0)})
    algorithms = Algorithms(config)
    assert algorithms.of("sums") is algorithms.of("maze") and len(algorithms.all) == 1


def test_a_familys_loss_and_weight_reach_the_gradient(directory: Path) -> None:
    """Only the other family is changed by another loss; twice the weight is twice the loss."""
    losses = {}
    for name, family in {
        "as the run": FamilyTrainingConfig(),
        "double": FamilyTrainingConfig(weight=2.0),
        "kimi": FamilyTrainingConfig(loss=LossConfig(name="kimi")),
    }.items():
        learner = make_learner(directory, minibatches=1, families={"sums": family}, loss=LossConfig(name="tis"))
        metrics = learner.update(make_batch(0), 0).metrics
        losses[name] = metrics["loss"]
        assert ("quadratic_penalty" in metrics) == (name == "kimi")
    only_maze = [row for row in make_batch(0) if row.family == "maze"]
    maze = make_learner(directory, minibatches=1, loss=LossConfig(name="tis")).update(only_maze, 0, num_families=2)
    assert losses["double"] - maze.metrics["loss"] == pytest.approx(
        2 * (losses["as the run"] - maze.metrics["loss"]), rel=1e-4
    )
    assert losses["kimi"] != losses["as the run"]


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gae"])
def test_unscored_and_wholly_stale_members_are_in_no_statistic(estimator: str) -> None:
    """The others get what they would get without them."""
    rows = [with_turns(make_row(i, reward=float(i % 3), length=10 + i)) for i in range(5)]
    beside = [with_turns(make_row(5, reward=None)), with_turns(make_row(6, reward=50.0))]
    algorithms = Algorithms(TrainingConfig(advantage=AdvantageConfig(estimator=estimator)))
    alone = algorithms.estimate(AdvantageInputs.of(rows))
    inputs = AdvantageInputs.of([*rows, *beside])
    inputs.trainable_RT[6][:] = False
    inputs.counted_R[6] = False
    together = algorithms.estimate(inputs)
    for own, other in zip(alone.values_RT, together.values_RT, strict=False):
        assert own.tolist() == pytest.approx(other.tolist(), abs=1e-6)
    assert together.excluded_R[5] == "unscored" and together.num_unscored == 1
    assert not together.values_RT[5].any()


def test_a_member_beyond_the_staleness_bound_leaves_the_baseline(directory: Path) -> None:
    """A row with one token within the bound stays in it."""
    for kept, reward_counts in ((0, False), (1, True)):
        rows = [*(make_row(i, reward=float(i), version=4) for i in range(2)), make_row(9, reward=8.0, version=0)]
        rows[2].token_versions[5 : 5 + kept] = 4
        learner = make_learner(directory, advantage=AdvantageConfig(scaling="none"), minibatches=1)
        learner.version = 4
        metrics = learner.update(rows, 4, max_staleness=2).metrics
        assert metrics["tokens/masked/stale"] == 3 - kept
        assert metrics["advantage/max_abs"] == pytest.approx(5.0 if reward_counts else 0.5)


class SignEstimator:
    """Advantage +1 or -1 by the sign of the reward; reads an argument."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.size = config.arguments["size"]

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        groups = group_rows(inputs)
        signs = {
            name: math.copysign(self.size, reward)
            for group in groups
            for name, reward in group.rewards.items()
            if reward is not None
        }
        return assemble(inputs, groups, spread(inputs, groups, signs), dropped=frozenset())


class LikelihoodLoss:
    """-A log p, nothing else."""

    needs_proximal = False

    def __init__(self, config: LossConfig) -> None:
        del config

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        values_N = -inputs.advantages_N * inputs.current_logprobs_N
        ones_N = torch.ones_like(inputs.advantages_N)
        return TokenLosses(values_N, ones_N, ones_N < 0)


class HalfWeight:
    """Every token at half its weight."""

    needs_proximal = False

    def __init__(self, config: CorrectionConfig) -> None:
        self.weight = config.arguments["weight"]

    def weights(self, inputs: CorrectionInputs) -> torch.Tensor:
        return torch.full_like(inputs.staleness_N, self.weight, dtype=torch.float32)


def test_estimator_loss_and_correction_of_ones_own_plug_in_by_import_path(directory: Path) -> None:
    own = {
        "advantage": AdvantageConfig(estimator=f"{__name__}:SignEstimator", arguments={"size": 2.0}),
        "loss": LossConfig(name=f"{__name__}:LikelihoodLoss"),
    }
    half = (CorrectionConfig(name=f"{__name__}:HalfWeight", arguments={"weight": 0.5}),)
    whole = make_learner(directory, minibatches=1, **own).update(make_batch(0), 0).metrics
    halved = make_learner(directory, minibatches=1, corrections=half, **own).update(make_batch(0), 0).metrics
    assert whole["advantage/max_abs"] == 2.0 and whole["loss"] != 0.0
    assert halved["loss"] == pytest.approx(whole["loss"] / 2, rel=1e-5)
    assert halved["correction/weight"] == 0.5


def test_kl_is_off_unless_asked_for() -> None:
    assert not any(each.needs_reference for each in Algorithms(TrainingConfig()).all)
    assert all(each.needs_reference for each in Algorithms(TrainingConfig(kl=KLConfig(coefficient=0.1))).all)


def with_penalties() -> AdvantageInputs:
    """Reward 1 with 0.1, 0.2 and 0.3 taken at its three tokens; a sibling of reward 0 without any."""
    rows = [make_row(0, reward=1.0), make_row(1, reward=0.0)]
    penalties = [np.zeros(12, np.float32) for _ in rows]
    penalties[0][5:8] = [0.1, 0.2, 0.3]
    return replace(AdvantageInputs.of(rows), penalty_RT=penalties, values_RT=[np.zeros(12, np.float32) for _ in rows])


def test_a_penalty_is_paid_by_its_token_and_those_before_it() -> None:
    """Returns to go 0.4, 0.5, 0.7 by token; whole rollouts are compared at 0.4."""
    inputs = with_penalties()
    to_go = [0.4, 0.5, 0.7]
    gae = AdvantageConfig(estimator="gae", gae_lambda=1.0)
    by_gae = Algorithms(TrainingConfig(advantage=gae, critic=CriticConfig())).estimate(inputs)
    assert by_gae.values_RT[0][5:8].tolist() == pytest.approx(to_go, abs=1e-6)
    plus_plus = AdvantageConfig(estimator="reinforce_plus_plus")
    whitened = Algorithms(TrainingConfig(advantage=plus_plus)).estimate(inputs)
    every = np.array([*to_go, 0.0, 0.0, 0.0])
    expected = (every - every.mean()) / every.std()
    assert whitened.values_RT[0][5:8].tolist() == pytest.approx(expected[:3].tolist(), abs=1e-5)
    by_rollout = Algorithms(TrainingConfig(advantage=AdvantageConfig(estimator="rloo"))).estimate(inputs)
    assert float(by_rollout.values_RT[0][5]) == pytest.approx(0.4, abs=1e-6)
    with pytest.raises(ValueError, match=r"training\.kl\.place is 'reward', which gdpo cannot use"):
        Algorithms(TrainingConfig(advantage=AdvantageConfig(estimator="gdpo"))).estimate(inputs)
