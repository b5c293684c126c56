"""Estimates of the KL divergence from the reference policy, by token (Schulman, "Approximating KL divergence", 2020).

With d = log policy - log reference, on tokens that the policy itself sampled: k1 = d (unbiased), k2 = d^2 / 2 (biased),
k3 = exp(-d) - 1 + d (unbiased, never negative). An unbiased value is no unbiased gradient (arXiv 2506.09477). The mean
gradient by the policy, at one position, is

| estimator | in the loss            | in the reward                                  |
|-----------|------------------------|------------------------------------------------|
| k1        | 0                      | that of KL(policy || reference)                |
| k2        | of KL(policy || ref.)  | of neither                                     |
| k3        | of KL(ref. || policy)  | of KL(policy || ref.) less KL(ref. || policy)  |

and on tokens of an older policy none of this holds exactly: the term carries no importance weight. All are computed in
float32, and finite with a finite gradient for any finite difference: k3 is clamped before `exp` (see `ratios`).
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
