"""Estimates of the KL divergence from the reference policy, by token (Schulman, "Approximating KL divergence", 2020).

With d = log policy - log reference, on tokens that the policy sampled: k1 = d (unbiased), k2 = d^2 / 2 (its gradient is
that of the divergence), k3 = exp(-d) - 1 + d (unbiased, never negative). All are computed in float32, and finite with a
finite gradient for any difference: k3 is clamped before `exp` (see `ratios`).
"""

from __future__ import annotations

import torch

from tasks.training.losses.ratios import k3


def reference_kl(policy_logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """float32, any shape; with the gradient of ``policy_logprobs``."""
    difference = policy_logprobs.float() - reference_logprobs.float()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return k3(-difference)
