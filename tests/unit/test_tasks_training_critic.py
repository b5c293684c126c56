"""The critic: what it learns, what it leaves alone, and its checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from resources.object_store import ObjectStore
from tasks.training.algorithm_config import (
    AdvantageConfig,
    CriticConfig,
    FamilyTrainingConfig,
)
from tasks.training.learner import Learner
from tests.unit.test_tasks_training_learner import make_batch, make_learner, weights
from tests.unit.test_tasks_training_model import make_model_directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def critic_learner(directory: Path, **critic) -> Learner:
    return make_learner(
        directory,
        advantage=AdvantageConfig(estimator="gae", gae_lambda=1.0, normalisation="batch"),
        critic=CriticConfig(learning_rate=0.05, value_clip=5.0, **critic),
    )


def test_the_critic_learns_the_return_and_leaves_the_decoder_alone(directory: Path) -> None:
    """Rewards 2 everywhere: values go from 0 to 2; the first advantages equal the reward, whitened away to 0."""
    learner = critic_learner(directory)
    before = weights(learner)
    errors = []
    for version in range(30):
        rows = [replace(row, reward=2.0) for row in make_batch(version)]
        metrics = learner.update(rows, version).metrics
        errors.append(metrics["critic/loss"])
        json.dumps(metrics, allow_nan=False)
        if version == 0:
            assert metrics["critic/return"] == pytest.approx(2.0, abs=1e-5)
            assert metrics["advantage/max_abs"] == 0.0
            assert float((weights(learner) - before).abs().max()) < 1e-3, "weight decay alone"
    assert errors[0] > 1.0 and errors[-1] < 0.1 and metrics["critic/value"] == pytest.approx(2.0, abs=0.3)


def test_the_value_loss_reaches_the_decoder_only_if_asked(directory: Path) -> None:
    for train_decoder in (False, True):
        learner = critic_learner(directory, train_decoder=train_decoder)
        assert learner._critic is not None
        torch.nn.init.ones_(learner._critic.head.weight)
        rows = [replace(row, reward=2.0) for row in make_batch(0)]
        norm = learner.update(rows, 0).metrics["grad_norm"]
        # Values differ between tokens here, so the policy has a gradient too; compare with one without the critic's.
        other = critic_learner(directory, train_decoder=False)
        assert other._critic is not None
        torch.nn.init.ones_(other._critic.head.weight)
        assert (norm == other.update(rows, 0).metrics["grad_norm"]) == (not train_decoder)


def test_a_restored_critic_goes_on_bitwise(directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    original = critic_learner(directory)
    original.update(make_batch(0), 0)
    original.save(store, "c")
    restored = critic_learner(directory)
    restored.restore(store, "c")
    for version in (1, 2):
        first, second = (each.update(make_batch(version), version).metrics for each in (original, restored))
        assert torch.equal(weights(original), weights(restored))
        assert first["critic/loss"] == second["critic/loss"] and first["critic/value"] == second["critic/value"]


def test_a_checkpoint_without_a_critic_is_refused_and_changes_nothing(directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    plain = make_learner(directory)
    plain.update(make_batch(0), 0)
    plain.save(store, "c")
    learner = critic_learner(directory)
    before = weights(learner)
    with pytest.raises(ValueError, match="was written without a critic"):
        learner.restore(store, "c")
    with pytest.raises(KeyError):
        learner.restore(store, "absent")
    assert torch.equal(weights(learner), before) and learner.version == 0


def test_a_family_without_a_critic_beside_one_with(directory: Path) -> None:
    gae = FamilyTrainingConfig(advantage=AdvantageConfig(estimator="gae"))
    learner = make_learner(directory, families={"sums": gae}, critic=CriticConfig(), minibatches=1)
    metrics = learner.update(make_batch(0), 0).metrics
    of_sums = [row for row in make_batch(0) if row.family == "sums"]
    returns = [row.reward for row in of_sums if row.reward is not None]
    assert metrics["critic/return"] == pytest.approx(np.mean(returns), rel=0.1)
