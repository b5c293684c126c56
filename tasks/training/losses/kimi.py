"""Kimi k1.5's policy mirror descent (arXiv 2501.12599, equation 3): a policy gradient with a squared log-ratio as its
trust region instead of a clip.

Loss of a token: -A log p + tau / 2 (log r)^2 with r = current / behaviour (or proximal, by ``ratio_to``). The square is
each token's own, as in ROLL Flash (arXiv 2510.11345); the paper's is that of the whole response's log-ratio, which
grows with its length.
"""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import LossConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.proximal import needs_recomputed, ratio_base
from tasks.training.losses.ratios import clamped_ratio


class Kimi:
    """Nothing is clipped: the further a token has moved, the harder it is pulled back."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.needs_proximal = needs_recomputed(config)

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        log_ratio_N = inputs.current_logprobs_N - ratio_base(inputs, self.config)
        penalty_N = 0.5 * self.config.quadratic_penalty * log_ratio_N.square()
        values_N = -inputs.advantages_N * inputs.current_logprobs_N + penalty_N
        ratio_N = clamped_ratio(log_ratio_N.detach())
        return TokenLosses(
            values_N,
            ratio_N,
            torch.zeros_like(ratio_N, dtype=torch.bool),
            sums={"quadratic_penalty": penalty_N.detach().sum()},
        )
