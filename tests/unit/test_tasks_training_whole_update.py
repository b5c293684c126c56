"""From rows to the gradient of a step, through the learner itself: against float64 code of its own, token by token.

The batch holds what goes wrong elsewhere: lengths that differ, rollouts of several rows, a dead group, a group of one,
unscored members, members beyond the staleness bound in part and in whole, a cut row, a family with nothing to train.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.training.algorithm_config import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    FamilyTrainingConfig,
    KLConfig,
)
from tasks.training.config import LossConfig, OptimizerConfig, ReferenceConfig, TrainingConfig
from tasks.training.learner import Learner
from tasks.training.row import TrainingRow, TurnSpan
from tests.golden import update_reference as reference
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import make_row

VERSION, BOUND = 5, 2
# With an epsilon far above any gradient the first step of AdamW moves by the gradient itself.
AS_IT_IS = OptimizerConfig(learning_rate=1e5, adam_epsilon=1e5, warmup_updates=0, weight_decay=0.0, max_grad_norm=1e9)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of the policy, and of a reference policy a little away from it."""
    policy = make_model_directory(tmp_path_factory.mktemp("policy"))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=noise)
    other = tmp_path_factory.mktemp("reference")
    model.save_pretrained(other)
    return policy, other


def batch(policy: torch.nn.Module) -> list[TrainingRow]:
    rng = np.random.default_rng(11)
    rows: list[TrainingRow] = []

    def add(
        family: str, group: str, reward: float | None, *, rollout: str | None = None, **changes: Any
    ) -> TrainingRow:
        number = len(rows)
        length = int(rng.integers(6, 20))
        trained = tuple(sorted(rng.choice(np.arange(2, length), size=int(rng.integers(1, length - 2)), replace=False)))
        row = make_row(
            number, length=length, trained=trained, reward=reward, family=family, group=f"{family}-{group}",
            version=VERSION, temperature=float(rng.choice([0.7, 1.0])), rollout=rollout, **changes,
        )  # fmt: skip
        with torch.no_grad():
            own = reference.log_distributions(policy, row)
        for t in trained:
            row.token_versions[t] -= int(rng.integers(0, BOUND + 1))
            row.behaviour_logprobs[t] = min(-1e-3, float(own[t - 1][row.token_ids[t]]) + rng.normal(0.0, 0.3))
        rows.append(replace(row, turns=(TurnSpan(0, 2, length, 0.0),)))
        return rows[-1]

    for reward in (1.0, 0.0, 0.3, None):
        add("maze", "a", reward)
    for _ in range(3):
        add("maze", "a", 0.6, rollout="maze-a-rewritten")
    add("maze", "a", 7.0).token_versions[:] = VERSION - BOUND - 1
    some = add("maze", "b", 1.0)
    some.token_versions[some.loss_mask.nonzero()[0][0]] = VERSION - BOUND - 1
    add("maze", "b", -0.5, truncated=True)
    for _ in range(3):
        add("maze", "dead", 1.0)
    add("maze", "alone", 1.0)
    for reward in (10.0, 4.0, 4.0, -3.0):
        add("sums", "a", reward)
    add("sums", "b", 2.0, rollout="sums-b-rewritten")
    add("sums", "b", 2.0, rollout="sums-b-rewritten")
    add("sums", "b", 6.0)
    for _ in range(2):
        add("idle", "unscored", None)
    return rows


def k1(d: Any) -> Any:
    return d


def k2(d: Any) -> Any:
    return d**2 / 2


def k3(d: Any) -> Any:
    return (math.exp(-d) if isinstance(d, float) else torch.exp(-d)) - 1 + d


def truncated(token: Any, row: list[Any]) -> float:
    return min(math.exp(token.p - token.b), 2.0) * (token.age <= 1)


def icepop_sequence(token: Any, row: list[Any]) -> float:
    weight = math.exp(sum(x.p - x.b for x in row) / len(row))
    return weight if 0.9 <= weight <= 1.2 else 0.0


def plan(**changes: Any) -> dict[str, Any]:
    plain = {"weigh": None, "kl": None, "entropy": 0.0, "weight": 1.0, "normalise": False}
    return {"advantage": reference.grpo, "loss": reference.ppo_clip, **plain, **changes}


CASES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], str]] = {
    "grpo, clip, kl in the loss, entropy, weights": (
        {
            "loss": LossConfig(entropy_coefficient=0.03),
            "kl": KLConfig(coefficient=0.2, estimator="k2"),
            "families": {"sums": FamilyTrainingConfig(weight=3.0)},
        },
        {
            "maze": plan(kl=(0.2, "loss", k2), entropy=0.03),
            "sums": plan(kl=(0.2, "loss", k2), entropy=0.03, weight=3.0),
        },
        "family_token_mean",
    ),
    "dr. grpo, policy gradient, corrections, cut rows masked": (
        {
            "advantage": AdvantageConfig(scaling="none"),
            "loss": LossConfig(name="policy_gradient"),
            "corrections": (
                CorrectionConfig(name="truncated_weight"),
                CorrectionConfig(name="staleness_mask", max_staleness=1),
            ),
            "truncated_rows": "mask",
            "fixed_length_tokens": 16,
        },
        dict.fromkeys(
            ("maze", "sums"), plan(advantage=reference.centred, loss=reference.policy_gradient, weigh=truncated)
        ),
        "fixed_length",
    ),
    "rloo, gspo, k3 in the reward": (
        {
            "advantage": AdvantageConfig(estimator="rloo"),
            "loss": LossConfig(name="gspo", clip_low=0.05, clip_high=0.08),
            "kl": KLConfig(coefficient=0.1, place="reward"),
        },
        dict.fromkeys(
            ("maze", "sums"), plan(advantage=reference.rloo, loss=reference.gspo, kl=(0.1, "reward", k3))
        ),
        "sequence_mean",
    ),
    "task advantage normalisation, a log-linear proximal policy": (
        {
            "advantage": AdvantageConfig(scaling="none", normalisation="family"),
            "loss": LossConfig(name="decoupled", proximal="loglinear"),
        },
        dict.fromkeys(
            ("maze", "sums"),
            plan(advantage=reference.centred, loss=reference.decoupled_loglinear, normalise=True),
        ),
        "token_mean",
    ),
    "families apart: topr by sequence with k3, kimi to the proximal policy with a mask": (
        {
            "advantage": AdvantageConfig(estimator="rloo"),
            "loss": LossConfig(name="topr", behaviour_weight_level="sequence_sum", positive_above=0.4),
            "kl": KLConfig(coefficient=0.1, estimator="k3"),
            "families": {
                "sums": FamilyTrainingConfig(
                    advantage=AdvantageConfig(),
                    loss=LossConfig(name="kimi", ratio_to="proximal"),
                    corrections=(CorrectionConfig(name="masked_weight", level="sequence_mean", low=0.9, high=1.2),),
                    kl=KLConfig(),
                )
            },
        },
        {
            "maze": plan(advantage=reference.rloo, loss=reference.topr_sequence, kl=(0.1, "loss", k3)),
            "sums": plan(loss=reference.kimi_proximal, weigh=icepop_sequence),
        },
        "family_token_mean",
    ),
    "reinforce++, cispo, k1 in the reward": (
        {
            "advantage": AdvantageConfig(estimator="reinforce_plus_plus"),
            "loss": LossConfig(name="cispo"),
            "kl": KLConfig(coefficient=0.1, place="reward", estimator="k1"),
            "families": {"sums": FamilyTrainingConfig(advantage=AdvantageConfig())},
        },
        {
            "maze": plan(
                advantage="return to go", loss=reference.cispo, kl=(0.1, "reward", k1), normalise=True
            ),
            "sums": plan(loss=reference.cispo, kl=(0.1, "reward", k1)),
        },
        "token_mean",
    ),
    "gae from values 0 with a critic, a family without": (
        {
            "families": {
                "maze": FamilyTrainingConfig(
                    advantage=AdvantageConfig(
                        estimator="gae", discount=reference.DISCOUNT, gae_lambda=reference.TRACE_DECAY
                    ),
                    weight=2.0,
                )
            },
            "critic": CriticConfig(),
        },
        {"maze": plan(advantage="gae, values 0", weight=2.0), "sums": plan()},
        "sequence_mean",
    ),
}  # fmt: skip


WANT_THE_WHOLE_BATCH = ("task advantage", "reinforce++")


@pytest.mark.parametrize(
    ("case", "streamed"),
    [
        (case, streamed)
        for case in CASES
        for streamed in (False, True)
        if not (streamed and case.startswith(WANT_THE_WHOLE_BATCH))
    ],
)
def test_a_step_is_the_sum_over_its_tokens(directories: tuple[Path, Path], case: str, streamed: bool) -> None:
    changes, plans, denominator = CASES[case]
    policy, other = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64).eval() for each in directories)
    rows = batch(policy)
    idle, corrections = plan(), changes.get("corrections", ())
    loss, num_trained = reference.step_loss(
        rows, policy, other, VERSION, BOUND, {**plans, "idle": idle}, denominator,
        mask_truncated=changes.get("truncated_rows") == "mask",
        staleness_mask=min([each.max_staleness for each in corrections if each.name == "staleness_mask"], default=99),
    )  # fmt: skip
    loss.backward()
    config = TrainingConfig(
        **changes,
        normaliser=denominator,
        minibatches=1,
        max_tokens_per_microbatch=40,
        streamed=streamed,
        reference=ReferenceConfig(model_directory=str(directories[1])) if "kl" in changes else None,
        optimizer=AS_IT_IS,
    )
    learner = Learner(directories[0], config, seed=0)
    learner.version = VERSION
    before = learner.tensors()
    if streamed:
        for group in dict.fromkeys(row.group_id for row in rows[:-4]):
            learner.stream([row for row in rows if row.group_id == group], VERSION, max_staleness=BOUND)
    metrics = learner.update(rows, VERSION, max_staleness=BOUND).metrics
    assert metrics["tokens/trained"] == num_trained
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    largest = max(float(parameter.grad.abs().max()) for parameter in policy.parameters() if parameter.grad is not None)
    for name, parameter in policy.named_parameters():
        gradient = before[name] - learner.tensors()[name]
        assert parameter.grad is not None
        assert float((gradient.double() - parameter.grad).abs().max()) < 1e-4 * largest, name
