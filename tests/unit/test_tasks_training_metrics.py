"""Every metric of an update of one small batch against its definition in the glossary, computed here by itself: in
float64, through transformers alone, one row at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.training.row import TrainingRow
from tests.unit.test_tasks_training_learner import make_batch, make_learner, with_logprobs
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import make_row

VERSION, BOUND, TEMPERATURE = 3, 1, 0.9
LOW, HIGH = 0.8, 1.28
EPSILON = 1e-4


@dataclass
class Token:
    """One sampled token: its log-probability under the learner, with gradient, and what is known of it."""

    current: torch.Tensor
    entropy: float
    shift: float
    """Learner minus engine."""
    version: int
    family: str
    advantage: float | None
    """None: not trained."""

    @property
    def ratio(self) -> torch.Tensor:
        return (self.current - self.current.detach() + self.shift).exp()


def make_rows() -> list[TrainingRow]:
    """Seven rollouts in eight rows: one of two rows, one truncated, one unscored, two of a dead group, one with a token
    beyond the bound."""

    def row(number: int, rollout: str, reward: float | None, versions: tuple[int, ...], **more) -> TrainingRow:
        group, family = rollout[0], "sums" if rollout[0] == "c" else "maze"
        made = make_row(
            number, length=9 + number, reward=reward, family=family, group=group, rollout=rollout,
            temperature=TEMPERATURE, **more,
        )  # fmt: skip
        made.token_versions[made.loss_mask] = versions
        return made

    return [
        row(0, "a0", 1.0, (2, 2, 3)),
        row(1, "a0", 1.0, (3, 3, 3)),
        row(2, "a1", 0.0, (3, 3, 3), truncated=True),
        row(3, "a2", None, (3, 3, 3)),
        row(4, "b0", 0.5, (3, 3, 3)),
        row(5, "b1", 0.5, (3, 3, 3)),
        row(6, "c0", 2.0, (1, 2, 3)),
        row(7, "c1", 0.0, (3, 3, 3)),
    ]


ADVANTAGES = {
    "a0": 0.5 / (0.5 + EPSILON), "a1": -0.5 / (0.5 + EPSILON), "c0": 1.0 / (1.0 + EPSILON),
    "c1": -1.0 / (1.0 + EPSILON),
}  # fmt: skip
"""GRPO, by hand: A has rewards 1, 0 and one unscored; C has 2 and 0."""
SHIFTS = [0.4, -0.4, 0.0, 0.1, -0.3, 0.2]
"""Learner minus engine, in turn: ratios of 1.49, 0.67, 1, 1.11, 0.74, 1.22."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory):
    """(metrics, tokens, float64 model) of the batch."""
    directory: Path = make_model_directory(tmp_path_factory.mktemp("model"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    rows, tokens = make_rows(), []
    for row in rows:
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0] / TEMPERATURE, -1)
        for at in row.loss_mask.nonzero()[0]:
            distribution, shift = logprobs[at - 1], SHIFTS[len(tokens) % len(SHIFTS)]
            version = int(row.token_versions[at])
            trained = row.rollout_id in ADVANTAGES and version >= VERSION - BOUND
            entropy = float(-(distribution.exp() * distribution).sum().detach())
            advantage = ADVANTAGES[row.rollout_id] if trained else None
            tokens.append(Token(distribution[ids[at]], entropy, shift, version, row.family, advantage))
            row.behaviour_logprobs[at] = float(distribution[ids[at]].detach()) - shift
    learner = make_learner(directory, minibatches=1)
    learner.version = VERSION
    return learner.update(rows, VERSION, max_staleness=BOUND).metrics, tokens, model


def test_what_the_batch_held(measured) -> None:
    metrics, _, _ = measured
    assert (metrics["reward/maze"], metrics["reward/sums"]) == (pytest.approx(2.0 / 4), 1.0)
    assert metrics["reward/mean"] == pytest.approx(4.0 / 6)
    assert (metrics["num_groups/maze"], metrics["num_groups/sums"]) == (2, 1)
    assert (metrics["num_trajectories/maze"], metrics["num_trajectories/sums"]) == (5, 2)
    assert (metrics["dead_group_share/maze"], metrics["dead_group_share/sums"]) == (0.5, 0.0)
    assert metrics["dead_group_share"] == pytest.approx(1 / 3)
    assert metrics["unscored_share"] == metrics["truncated_share"] == pytest.approx(1 / 7)
    assert metrics["staleness/max"] == 2 and metrics["staleness/mean"] == pytest.approx((1 + 2) / 7)
    assert (metrics["trained_tokens/maze"], metrics["trained_tokens/sums"], metrics["tokens/trained"]) == (9, 5, 14)
    masked = {cause: metrics[f"tokens/masked/{cause}"] for cause in ("unscored", "dead_group", "truncated", "stale")}
    assert masked == {"unscored": 3, "dead_group": 6, "truncated": 0, "stale": 1}


def test_advantages(measured) -> None:
    metrics, tokens, _ = measured
    of_tokens = np.array([token.advantage for token in tokens if token.advantage is not None])
    of_maze = [token.advantage for token in tokens if token.advantage is not None and token.family == "maze"]
    assert metrics["advantage/mean"] == pytest.approx(of_tokens.mean(), rel=1e-6)
    assert metrics["advantage/std"] == pytest.approx(of_tokens.std(), rel=1e-6)
    assert metrics["advantage/max_abs"] == pytest.approx(1.0 / (1.0 + EPSILON), rel=1e-6)
    assert metrics["advantage/std/maze"] == pytest.approx(np.std(of_maze), rel=1e-6)


def test_ratios_clips_divergence_and_entropy(measured) -> None:
    """Over trained tokens alone: the others have the same ratios, in other numbers."""
    metrics, tokens, _ = measured
    trained = [token for token in tokens if token.advantage is not None]
    ratios = [math.exp(token.shift) for token in trained]
    clipped = [
        (ratio > HIGH and token.advantage > 0) or (ratio < LOW and token.advantage < 0)
        for ratio, token in zip(ratios, trained, strict=True)
        if token.advantage is not None
    ]
    assert 0 < sum(clipped) < len(clipped)
    assert metrics["ratio/mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert (metrics["ratio/min"], metrics["ratio/max"]) == pytest.approx((min(ratios), max(ratios)), rel=1e-5)
    assert metrics["clip_share"] == pytest.approx(np.mean(clipped))
    assert metrics["approx_kl"] == pytest.approx(
        np.mean([math.exp(t.shift) - 1.0 - t.shift for t in trained]), rel=1e-4
    )
    assert metrics["entropy"] == pytest.approx(np.mean([token.entropy for token in trained]), rel=1e-5)


def test_the_learner_against_the_engine(measured) -> None:
    metrics, tokens, _ = measured
    trained = [token for token in tokens if token.advantage is not None]
    for name, of in (
        ("engine_difference", [abs(token.shift) for token in trained if token.version == VERSION]),
        ("policy_drift", [abs(token.shift) for token in trained if token.version < VERSION]),
    ):
        assert metrics[f"{name}/num_tokens"] == len(of) > 0
        assert metrics[f"{name}/mean"] == pytest.approx(np.mean(of), abs=2e-6)
        assert metrics[f"{name}/max"] == pytest.approx(max(of), abs=2e-6)


def test_loss_and_gradient_norm(measured) -> None:
    """PPO's clip, each family's tokens by their number, two families alike."""
    metrics, tokens, model = measured
    loss = torch.zeros((), dtype=torch.float64)
    for token in tokens:
        if token.advantage is not None:
            ratio, advantage = token.ratio, token.advantage
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(LOW, HIGH) * advantage)
            loss = loss - surrogate / ({"maze": 9, "sums": 5}[token.family] * 2)
    model.zero_grad()
    loss.backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert metrics["grad_norm"] == metrics["grad_norm/max"] == pytest.approx(norm, rel=1e-4)
    assert (metrics["optimizer_steps"], metrics["optimizer_steps/total"]) == (1, 1)


def test_the_engine_is_compared_before_the_first_step_alone(measured, tmp_path: Path) -> None:
    """Of two minibatches the second is run on other weights: its rows are not compared, and its ratios are others."""
    directory = make_model_directory(tmp_path)
    rows = [with_logprobs(directory, row, shift=0.0, version=0) for row in make_batch(0)]
    metrics = make_learner(directory, minibatches=2).update(rows, 0).metrics
    assert metrics["engine_difference/num_tokens"] == metrics["tokens/trained"] / 2 == 24
    assert metrics["engine_difference/max"] < 1e-5
    assert metrics["ratio/min"] < 0.999 and metrics["ratio/max"] > 1.001, "of both steps, not of one"
