"""A trajectory whose turns were sampled under several versions trains with the importance ratio of each token's own
version: gradients against a separate float64 computation from the weights of those versions (arXiv 2510.04206)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.training.algorithm_config import CorrectionConfig
from tasks.training.config import LossConfig
from tasks.training.model import load_policy
from tasks.training.normalisers import token_mean
from tasks.training.packing import PackableSequence
from tasks.training.steps import TrainableRows
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import VOCABULARY
from tests.unit.test_tasks_training_steps import gradient_of, steps_over

LEARNER_VERSION = 4
VERSIONS = (1, 3, 4)
"""Of a trajectory's turns: a stale engine's, one before a load, and the learner's own."""
TEMPERATURE = 0.8
LENGTH = 26
CAP, LOW, HIGH = 2.0, 0.8, 1.28


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def weights_of(directory: Path, version: int) -> torch.nn.Module:
    """A version's policy in float64; the learner's is the directory itself, older ones lie further away."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    noise = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            away = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
            parameter += 0.01 * (LEARNER_VERSION - version) * away
    return model


def token_logprobs(model: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    """float64 [T]: of each token, given those before it (0 for the first)."""
    tokens = torch.tensor(ids, dtype=torch.int64)
    logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0] / TEMPERATURE, -1)
    return torch.cat([torch.zeros(1, dtype=torch.float64), logprobs[:-1].gather(1, tokens[1:, None])[:, 0]])


def turns_of(rng: np.random.Generator) -> np.ndarray:
    """int32 [T]: -1 on what was read, else the version of the turn that sampled the token."""
    versions = np.full(LENGTH, -1, np.int32)
    start = 3
    for version in rng.permutation(VERSIONS):
        versions[start : start + 5] = version
        start += 7
    return versions


@pytest.mark.parametrize("case", ["ppo_clip", "decoupled", "truncated_weight"])
def test_each_token_is_weighed_by_the_version_that_sampled_it(directory: Path, case: str) -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCABULARY, LENGTH) for _ in range(4)]
    versions = [turns_of(rng) for _ in ids]
    advantages = [float(value) for value in rng.normal(size=len(ids))]
    policies = {version: weights_of(directory, version) for version in VERSIONS}
    with torch.no_grad():
        under = {version: [token_logprobs(model, each) for each in ids] for version, model in policies.items()}
    behaviour = [
        np.where(of >= 0, np.select([of == v for v in VERSIONS], [under[v][row].numpy() for v in VERSIONS]), 0.0)
        for row, of in enumerate(versions)
    ]
    rows = TrainableRows(
        sequences=[
            PackableSequence(each.astype(np.int32), of >= 0, TEMPERATURE)
            for each, of in zip(ids, versions, strict=True)
        ],
        families=["maze"] * len(ids),
        advantages_RT=[np.full(LENGTH, advantage, np.float32) for advantage in advantages],
        behaviour_RT=[each.astype(np.float32) for each in behaviour],
        versions_RT=versions,
        num_families=1,
        version=LEARNER_VERSION,
        rewards_R=[0.0] * len(ids),
    )

    # One token at a time, by the weights of its own version.
    learner = weights_of(directory, LEARNER_VERSION)
    total, ratios = torch.zeros((), dtype=torch.float64), []
    for row, of in enumerate(versions):
        current = token_logprobs(learner, ids[row])
        for t in np.flatnonzero(of >= 0).tolist():
            ratio = torch.exp(current[t] - under[int(of[t])][row][t])
            ratios.append(float(ratio.detach()))
            if case == "ppo_clip":
                token = -torch.min(ratio * advantages[row], ratio.clamp(LOW, HIGH) * advantages[row])
            elif case == "decoupled":  # at the start proximal is current: its own ratio is 1, with a gradient
                token = -ratio.detach().clamp(max=CAP) * torch.exp(current[t] - current[t].detach()) * advantages[row]
            else:
                token = -ratio.detach().clamp(max=CAP) * advantages[row] * current[t]
            total = total + token
    total = total / len(ratios)
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in learner.parameters() if p.grad is not None])
    expected *= min(1.0, 1.0 / (float(expected.norm()) + 1e-6))
    own = np.concatenate([of[of >= 0] == LEARNER_VERSION for of in versions])
    assert np.allclose(np.array(ratios)[own], 1.0) and np.abs(np.log(np.array(ratios)[~own])).min() > 1e-4

    settings = (
        {"loss": LossConfig(name="policy_gradient"), "corrections": (CorrectionConfig(name="truncated_weight"),)}
        if case == "truncated_weight"
        else {"loss": LossConfig(name=case)}
    )
    model = load_policy(directory, "packed", "cpu")
    steps = steps_over(rows, model, token_mean, **settings)
    steps.passes.prepare_corrections()
    _, loss, _ = steps.accumulate_gradient(range(len(ids)), at_start=True)
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    assert float((gradient_of(model).double() - expected).abs().max()) < 1e-6
