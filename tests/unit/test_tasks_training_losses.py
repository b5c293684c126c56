"""Token losses and ratio arithmetic: M6, M7, M8, and the float64 values of tests/golden."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tasks.training.config import LossConfig
from tasks.training.losses.base import Loss, LossInputs, TokenLosses
from tasks.training.losses.decoupled import DecoupledPPO
from tasks.training.losses.ppo_clip import PPOClip
from tasks.training.losses.ratios import behaviour_weights, clamped_ratio, k3, sequence_log_ratios

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "training.json").read_text())


def evaluate(loss: Loss, case: dict) -> tuple[TokenLosses, torch.Tensor]:
    """Losses of a golden case and the gradient of their sum by the current log-probabilities."""
    current = torch.tensor(case["current"], requires_grad=True)
    losses = loss.token_losses(
        LossInputs(
            current_logprobs_N=current,
            behaviour_logprobs_N=torch.tensor(case["behaviour"]),
            proximal_logprobs_N=torch.tensor(case["proximal"]) if loss.needs_proximal else None,
            advantages_N=torch.tensor(case["advantages"]),
            sequence_N=torch.tensor(case["sequence"]),
            num_sequences=max(case["sequence"]) + 1,
        )
    )
    (gradient,) = torch.autograd.grad(losses.values_N.sum(), current)
    return losses, gradient


@pytest.mark.parametrize("case", GOLDEN["ppo_clip"])
def test_ppo_clip_golden(case: dict) -> None:
    losses, gradient = evaluate(PPOClip(LossConfig(clip_low=case["clip_low"], clip_high=case["clip_high"])), case)
    assert losses.values_N.tolist() == pytest.approx(case["values"], rel=1e-5)
    assert gradient.tolist() == pytest.approx(case["gradients"], rel=1e-5)
    assert losses.clipped_N.tolist() == case["clipped"]
    assert any(case["clipped"])


@pytest.mark.parametrize("case", GOLDEN["decoupled"])
def test_decoupled_golden(case: dict) -> None:
    config = LossConfig(
        name="decoupled",
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        behaviour_weight_cap=case["cap"],
        behaviour_weight_level=case["level"],
    )
    losses, gradient = evaluate(DecoupledPPO(config), case)
    assert losses.values_N.tolist() == pytest.approx(case["values"], rel=1e-5)
    assert gradient.tolist() == pytest.approx(case["gradients"], rel=1e-5)
    assert losses.clipped_N.tolist() == case["clipped"]


def test_a_stale_token_keeps_its_gradient_when_the_proximal_policy_is_the_learner() -> None:
    """Ratio 2 on behaviour logprobs is outside the clip; against the learner itself it is 1, weighed by the cap."""
    case = {
        "current": [-1.0], "proximal": [-1.0], "behaviour": [-1.0 - math.log(2.0)], "advantages": [1.0],
        "sequence": [0],
    }  # fmt: skip
    _, lost = evaluate(PPOClip(LossConfig()), case)
    _, kept = evaluate(DecoupledPPO(LossConfig(name="decoupled", behaviour_weight_cap=1.5)), case)
    assert lost.tolist() == [0.0]
    assert kept.tolist() == pytest.approx([-1.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e4])
def test_m6_k3_is_finite(dtype: torch.dtype, difference: float) -> None:
    """M6: a log-probability difference of 100, float32 and bfloat16: finite value, finite gradient."""
    log_ratio = torch.tensor([difference], dtype=dtype, requires_grad=True)
    value = k3(log_ratio)
    value.sum().backward()
    assert torch.isfinite(value).all() and (value >= 0).all()
    assert log_ratio.grad is not None and torch.isfinite(log_ratio.grad).all()


def test_k3_by_hand() -> None:
    assert k3(torch.tensor([0.0, math.log(2.0)])).tolist() == pytest.approx([0.0, 1.0 - math.log(2.0)], abs=1e-6)


def test_m7_sequence_weight_modes_are_told_apart() -> None:
    """M7: 8,000 tokens at -3.5e-4 each: 0.061 by the sum, 0.9997 by the mean."""
    log_ratio = torch.full((8000,), -3.5e-4)
    sequence = torch.zeros(8000, dtype=torch.int64)
    by_sum = behaviour_weights(log_ratio, sequence, 1, "sequence_sum")
    by_mean = behaviour_weights(log_ratio, sequence, 1, "sequence_mean")
    assert float(by_sum[0]) == pytest.approx(0.0608, abs=2e-4)
    assert float(by_mean[0]) == pytest.approx(0.99965, abs=1e-5)
    assert by_sum.shape == by_mean.shape == (8000,)


def test_m7_both_values_are_among_the_metrics() -> None:
    case = {
        "current": [-1.0] * 8000, "proximal": [-1.0] * 8000, "behaviour": [-1.0 + 3.5e-4] * 8000,
        "advantages": [1.0] * 8000, "sequence": [0] * 8000,
    }  # fmt: skip
    losses, _ = evaluate(DecoupledPPO(LossConfig(name="decoupled", behaviour_weight_cap=0.5)), case)
    assert float(losses.sums["behaviour_weight/sequence_sum"]) / 8000 == pytest.approx(0.061, abs=1e-3)
    assert float(losses.sums["behaviour_weight/sequence_mean"]) / 8000 == pytest.approx(0.9997, abs=1e-4)


def test_m8_two_sequences_with_ratio_one() -> None:
    """M8: the ratio of each token is 1.0 and has the shape of the tokens."""
    case = {
        "current": [-1.0, -2.0, -3.0], "proximal": [-1.0, -2.0, -3.0], "behaviour": [-1.0, -2.0, -3.0],
        "advantages": [1.0, 1.0, -1.0], "sequence": [0, 1, 1],
    }  # fmt: skip
    for loss in (PPOClip(LossConfig()), DecoupledPPO(LossConfig(name="decoupled"))):
        losses, gradient = evaluate(loss, case)
        assert losses.ratio_N.tolist() == [1.0, 1.0, 1.0]
        assert losses.values_N.tolist() == [-1.0, -1.0, 1.0]
        assert gradient.tolist() == [-1.0, -1.0, 1.0]


def test_extreme_ratios_stay_finite() -> None:
    assert torch.isfinite(clamped_ratio(torch.tensor([1e5, -1e5, 100.0]))).all()
    case = {"current": [-1.0], "proximal": [-200.0], "behaviour": [-400.0], "advantages": [-1.0], "sequence": [0]}
    for loss in (PPOClip(LossConfig()), DecoupledPPO(LossConfig(name="decoupled"))):
        losses, gradient = evaluate(loss, case)
        assert torch.isfinite(losses.values_N).all() and torch.isfinite(gradient).all()


def test_a_sequence_without_tokens_has_log_ratio_zero() -> None:
    sums, means = sequence_log_ratios(torch.tensor([-1.0, -3.0]), torch.tensor([1, 1]), 3)
    assert sums.tolist() == [0.0, -4.0, 0.0]
    assert means.tolist() == [0.0, -2.0, 0.0]


@pytest.mark.parametrize("loss", [PPOClip(LossConfig()), DecoupledPPO(LossConfig(name="decoupled"))])
def test_m4_no_token_at_all_is_loss_zero(loss: Loss) -> None:
    """M4: with every token masked nothing is left to sum: 0.0, with a gradient that is finite."""
    current = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    losses = loss.token_losses(
        LossInputs(current, empty, empty, empty, torch.zeros(0, dtype=torch.int64), num_sequences=2)
    )
    total = losses.values_N.sum()
    total.backward()
    assert total.item() == 0.0
    assert all(math.isfinite(float(value)) for value in losses.sums.values())
