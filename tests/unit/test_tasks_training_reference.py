"""The reference policy: frozen, read once an update, and the same one whether it is a copy or the policy without its
adapter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.training.algorithm_config import KLConfig
from tasks.training.config import LoraConfig, ReferenceConfig
from tasks.training.learner import Learner
from tasks.training.token_reads import read_sampled_tokens
from tests.unit.test_tasks_training_learner import make_batch, make_learner
from tests.unit.test_tasks_training_model import make_model_directory

KL = KLConfig(coefficient=0.1)
LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def read_reference(learner: Learner) -> np.ndarray:
    assert learner._reference is not None
    logprobs = learner._reference.logprobs
    return np.concatenate(read_sampled_tokens(make_batch(0), logprobs, learner.config, learner.device))


def test_a_copy_and_the_policy_without_its_adapter_are_one_reference(directory: Path) -> None:
    copy, adapter = make_learner(directory, kl=KL), make_learner(directory, kl=KL, lora=LORA)
    start = read_reference(copy)
    np.testing.assert_allclose(read_reference(adapter), start, atol=1e-6)
    for learner in (copy, adapter):
        first, second = (learner.update(make_batch(version), version).metrics for version in (0, 1))
        assert first["reference_kl"] < second["reference_kl"], "the policy has left it"
        np.testing.assert_array_equal(read_reference(learner), read_reference(learner))
        np.testing.assert_allclose(read_reference(learner), start, atol=1e-6)


def test_nobody_computes_a_reference_that_nobody_asks_for(directory: Path) -> None:
    learner = make_learner(directory, reference=ReferenceConfig())
    assert learner._reference is None
    assert "reference_kl" not in learner.update(make_batch(0), 0).metrics


def test_a_penalty_in_the_reward_moves_the_policy_back(directory: Path) -> None:
    """With a reference that finds the better rows unlikely, what they earn is taken from them."""
    plain = make_learner(directory).update(make_batch(0), 0).metrics
    held = make_learner(directory, kl=KLConfig(coefficient=0.5, place="reward", estimator="k1"))
    metrics = held.update(make_batch(0), 0).metrics
    assert metrics["advantage/std"] != plain["advantage/std"]
    assert metrics["reward/mean"] == plain["reward/mean"], "the metric is the reward as it was given"


def test_a_reference_that_is_missing_or_of_another_vocabulary_is_refused(directory: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.resize_token_embeddings(48)
    model.save_pretrained(tmp_path)
    missing = str(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"reference\.model_directory is .*missing.* there is no such folder"):
        make_learner(directory, kl=KL, reference=ReferenceConfig(model_directory=missing))
    with pytest.raises(ValueError, match=r"reference\.model_directory is .* vocabulary holds 48 tokens.* policy's 40"):
        make_learner(directory, kl=KL, reference=ReferenceConfig(model_directory=str(tmp_path)))
