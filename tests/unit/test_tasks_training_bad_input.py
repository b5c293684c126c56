"""What bad input comes to: poor batches, wrong rows, algorithms without what they need. M6."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tasks.training.algorithm_config import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    FamilyTrainingConfig,
)
from tasks.training.algorithms import Algorithms
from tasks.training.config import LossConfig, TrainingConfig
from tasks.training.losses.reference_kl import reference_kl
from tasks.training.plugins import ESTIMATORS, LOSSES
from tasks.training.requirements import check_requirements
from tasks.training.row import TurnSpan
from tests.unit.test_tasks_training_algorithms import with_turns
from tests.unit.test_tasks_training_learner import make_batch, make_learner, weights
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import make_row


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_algorithm_survives_a_poor_batch(directory: Path, estimator: str, loss: str) -> None:
    """One member; one group of equal rewards; nothing scored; no trained token: a step or a counted, explained skip."""
    learner = make_learner(
        directory,
        advantage=AdvantageConfig(estimator=estimator),
        loss=LossConfig(name=loss),
        critic=CriticConfig() if estimator == "gae" else None,
        minibatches=1,
    )
    batches = [
        [make_row(0, reward=1.0)],
        [make_row(i, reward=0.5) for i in range(3)],
        [make_row(i, reward=None) for i in range(3)],
        [make_row(i, reward=float(i), trained=()) for i in range(3)],
        [],
    ]
    for version, rows in enumerate(batches):
        report = learner.update([with_turns(row) for row in rows], version)
        json.dumps(report.metrics, allow_nan=False)
        assert (report.optimizer_steps == 0) == (report.skipped is not None)
        assert report.optimizer_steps == 0 or estimator in ("gae", "reinforce_plus_plus")
    assert torch.isfinite(weights(learner)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused_before_anything_changes(directory: Path, value: float) -> None:
    learner = make_learner(directory)
    before = weights(learner)
    good = with_turns(make_row(0))
    for bad, message in (
        (replace(good, reward=value), "reward is"),
        (replace(good, reward_components={"outcome": value}), "reward component 'outcome' is"),
        (replace(good, turns=(TurnSpan(0, 5, 8, value),)), "reward of turn 0 is"),
    ):
        with pytest.raises(ValueError, match=message):
            learner.update([bad], 0)
    assert torch.equal(weights(learner), before) and learner.version == 0


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ((TurnSpan(0, 5, 7),), "a sampled token lies in no turn"),
        ((TurnSpan(0, 5, 13),), "turns lie in order and do not overlap"),
        ((TurnSpan(0, 5, 7), TurnSpan(6, 7, 8)), "turn 1 spans 6, 7, 8 behind 7"),
    ],
)
def test_turns_that_do_not_fit_the_row_are_refused(turns: tuple[TurnSpan, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_row(0), turns=turns).validate(version=0, vocabulary_size=40)


@pytest.mark.parametrize("estimator", ["gigpo", "turn_returns"])
def test_an_estimator_by_turn_refuses_rows_without_turns(directory: Path, estimator: str) -> None:
    learner = make_learner(directory, advantage=AdvantageConfig(estimator=estimator))
    with pytest.raises(ValueError, match=rf"v0-0/\d+ \(maze\): its turns are not known, and {estimator} works by turn"):
        learner.update(make_batch(0), 0)
    assert learner.version == 0


def test_what_an_algorithm_needs_and_the_run_lacks_is_refused_at_the_start() -> None:
    gae = AdvantageConfig(estimator="gae")
    with pytest.raises(ValidationError, match=r"training\.advantage\.estimator is 'gae', which needs a critic"):
        TrainingConfig(advantage=gae)
    with pytest.raises(ValidationError, match=r"training\.families\.maze\.advantage\.estimator is 'gae'"):
        TrainingConfig(families={"maze": FamilyTrainingConfig(advantage=gae)})
    with pytest.raises(ValidationError, match=r"training\.critic is given, but no estimator reads it"):
        TrainingConfig(critic=CriticConfig())
    with pytest.raises(ValidationError, match=r"training\.fixed_length_tokens is null"):
        TrainingConfig(normaliser="fixed_length")
    with pytest.raises(ValidationError, match=r"low 2\.0 and high 1\.0; low must be below high"):
        CorrectionConfig(name="ratio_mask", low=2.0, high=1.0)


def test_an_algorithm_that_no_family_has_is_neither_asked_for_what_it_needs_nor_built() -> None:
    """The run's own lacks a critic and its plug-in cannot be found; every family does otherwise."""
    own = {"advantage": AdvantageConfig(estimator="gae"), "loss": LossConfig(name="nowhere.to_be_found:Loss")}
    grpo, clip = AdvantageConfig(), LossConfig()
    families = {
        "maze": FamilyTrainingConfig(advantage=grpo, loss=clip),
        "sums": FamilyTrainingConfig(advantage=AdvantageConfig(estimator="rloo"), loss=clip),
    }
    config = TrainingConfig(**own, families=families)
    check_requirements(config, ["maze", "sums"])
    algorithms = Algorithms(config.for_families(["maze", "sums"]))
    assert len(algorithms.all) == 2 and not algorithms.needs_critic
    assert [algorithms.of(name).advantage.estimator for name in ("maze", "sums")] == ["grpo", "rloo"]
    with pytest.raises(ValueError, match=r"training\.advantage\.estimator is 'gae', which needs a critic"):
        check_requirements(config, ["maze", "sums", "code"])
    assert config.for_families(["maze", "sums", "code"]) is config
    with pytest.raises(ValueError, match="nowhere"):
        Algorithms(config)
    TrainingConfig(**own, critic=CriticConfig(), families={"maze": families["maze"]})


@pytest.mark.parametrize(("loss", "remedy"), [("ppo_clip", "ratio_to to 'proximal'"), ("decoupled", "leave the corr")])
def test_the_behaviour_policy_is_divided_by_once(loss: str, remedy: str) -> None:
    weight = (CorrectionConfig(name="truncated_weight"),)
    with pytest.raises(ValidationError, match=f"already weighs by the behaviour policy; .*{remedy}"):
        TrainingConfig(loss=LossConfig(name=loss), corrections=weight)
    TrainingConfig(loss=LossConfig(name="ppo_clip", ratio_to="proximal"), corrections=weight)
    TrainingConfig(loss=LossConfig(name="policy_gradient"), corrections=weight)
    TrainingConfig(corrections=(CorrectionConfig(name="ratio_mask"), CorrectionConfig(name="m2po")))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_m6_every_kl_estimate_is_finite(estimator: str, dtype: torch.dtype, difference: float) -> None:
    """M6: a log-probability difference of 100: finite value, finite gradient."""
    policy = torch.tensor([-101.0 if difference > 0 else -1.0], dtype=dtype, requires_grad=True)
    values = reference_kl(
        policy, torch.tensor([-101.0 + difference if difference > 0 else -101.0], dtype=dtype), estimator
    )
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert policy.grad is not None and torch.isfinite(policy.grad).all()
