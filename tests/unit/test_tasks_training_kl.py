"""What a KL term pulls towards: the exact mean gradient of each estimate, over all tokens of a small vocabulary."""

from __future__ import annotations

import pytest
import torch

from tasks.training.losses.ratios import k3
from tasks.training.losses.reference_kl import reference_kl

POLICY = [0.3, -1.2, 0.8, 0.1, -0.4]
REFERENCE = [-0.5, 0.4, 0.2, -1.0, 0.9]


def divergence_gradients() -> dict[str, torch.Tensor]:
    """By the policy's logits, in float64: of KL(policy || reference), of KL(reference || policy), and 0."""
    logits = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    policy, reference = (torch.log_softmax(each, 0) for each in (logits, torch.tensor(REFERENCE, dtype=torch.float64)))
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits)
    return {"reverse": reverse, "forward": forward, "none": torch.zeros(5, dtype=torch.float64)}


def mean_gradient(estimator: str, place: str) -> torch.Tensor:
    """Of the term, each token as often as the policy samples it. In the reward the estimate is a constant that the
    policy gradient weighs."""
    logits = torch.tensor(POLICY, requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    values = reference_kl(logprobs, torch.log_softmax(torch.tensor(REFERENCE), 0), estimator)
    terms = values if place == "loss" else values.detach() * logprobs
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * terms).sum(), logits)
    return gradient.double()


@pytest.mark.parametrize(
    ("estimator", "place", "of"),
    [("k1", "loss", "none"), ("k2", "loss", "reverse"), ("k3", "loss", "forward"), ("k1", "reward", "reverse")],
)
def test_the_mean_gradient_of_an_estimate_is_that_of_its_divergence(estimator: str, place: str, of: str) -> None:
    expected = divergence_gradients()
    assert float((mean_gradient(estimator, place) - expected[of]).abs().max()) < 1e-6
    others = [gradient for name, gradient in expected.items() if name != of]
    assert all(float((gradient - expected[of]).abs().max()) > 0.01 for gradient in others)


def test_k3_in_the_reward_pulls_by_the_difference_of_both_divergences() -> None:
    expected = divergence_gradients()
    difference = mean_gradient("k3", "reward") - (expected["reverse"] - expected["forward"])
    assert float(difference.abs().max()) < 1e-6
    biased = mean_gradient("k2", "reward")
    assert min(float((biased - each).abs().max()) for each in expected.values()) > 0.01


def test_a_token_that_the_reference_finds_impossible_keeps_its_pull() -> None:
    """Far beyond where `exp` is clamped: the term still pushes the policy away from it; M6 is about the other side."""
    policy = torch.tensor([-0.5, -0.5, -60.0], requires_grad=True)
    values = reference_kl(policy, torch.tensor([-30.5, -500.5, -0.5]), "k3")
    (gradient,) = torch.autograd.grad(values.sum(), policy)
    assert values[:2].tolist() == pytest.approx([29.0, 499.0])
    assert gradient[:2].tolist() == pytest.approx([1.0, 1.0])
    assert torch.isfinite(values).all() and torch.isfinite(gradient).all()
    assert float(k3(torch.tensor(-40.0))) == pytest.approx(39.0)
