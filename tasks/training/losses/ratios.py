"""Importance ratios and KL estimates that stay finite, whatever two policies disagree on."""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import WeightLevel

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this before `exp`: exp(20) is 4.9e8, finite in float32 and in bfloat16."""


def clamped_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the clamped log-ratio, computed in float32; any shape. No gradient beyond the clamp."""
    return log_ratio.float().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Low-variance KL estimate exp(d) - 1 - d >= 0 of KL(q || p), where d = log p - log q and samples come from q.

    Schulman, "Approximating KL divergence" (2020), the estimator named k3. ``d`` is clamped from above before `exp` and
    before the difference, so value and gradient are finite for any finite input; computed in float32. From below it is
    not: there the estimate is linear, and a clamp would take the gradient from the tokens that are furthest away.
    """
    clamped = log_ratio.float().clamp(max=MAX_LOG_RATIO)
    return clamped.exp() - 1.0 - clamped


def behaviour_weights(
    log_ratio_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    level: WeightLevel,
) -> torch.Tensor:
    """Importance weight of each token [N], before truncation: its own ratio, or that of its whole sequence.

    ``sequence_sum`` is exp(sum of log-ratios), the ratio of the two probabilities of the sequence; ``sequence_mean``
    its geometric mean per token. For 8,000 tokens at -3.5e-4 each they are 0.061 and 0.9997: which one is meant is
    named in the configuration, and both are among the metrics.
    """
    if level == "token":
        return clamped_ratio(log_ratio_N)
    sums_S, means_S = sequence_log_ratios(log_ratio_N, sequence_N, num_sequences)
    return clamped_ratio(sums_S if level == "sequence_sum" else means_S).index_select(0, sequence_N)


def sequence_log_ratios(
    log_ratio_N: torch.Tensor, sequence_N: torch.Tensor, num_sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and mean of the tokens' log-ratios by sequence, float32 [S] each (0 for a sequence without tokens)."""
    zeros_S = torch.zeros(num_sequences, dtype=torch.float32, device=log_ratio_N.device)
    sums_S = zeros_S.index_add(0, sequence_N, log_ratio_N.float())
    counts_S = zeros_S.index_add(0, sequence_N, torch.ones_like(log_ratio_N, dtype=torch.float32))
    return sums_S, sums_S / counts_S.clamp(min=1.0)
