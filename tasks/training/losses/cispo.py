"""CISPO: the importance weight is clipped, the gradient of every token stays (arXiv 2506.13585, equation 4).

Loss of a token: -sg(clip(r, 1 - low, 1 + high)) A log p with r = current / behaviour (or proximal, by ``ratio_to``), p
the current policy, sg a constant. The paper leaves the lower bound out, which is the default here.
"""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import LossConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.proximal import needs_recomputed, ratio_base
from tasks.training.losses.ratios import clamped_ratio


class CISPO:
    """A token whose weight is clipped still gives a gradient; ``clipped_N`` says where the weight was cut."""

    default_clip = (1.0, 0.28)

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.needs_proximal = needs_recomputed(config)
        self.bounds = config.clip_bounds(*self.default_clip)

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        ratio_N = clamped_ratio((inputs.current_logprobs_N - ratio_base(inputs, self.config)).detach())
        return weighted_log_likelihood(inputs, ratio_N, ratio_N.clamp(*self.bounds))


def weighted_log_likelihood(inputs: LossInputs, ratio_N: torch.Tensor, weight_N: torch.Tensor) -> TokenLosses:
    """-weight A log p, the weight a constant; a token counts as clipped where its weight is not its ratio."""
    values_N = -weight_N * inputs.advantages_N * inputs.current_logprobs_N
    return TokenLosses(values_N, ratio_N, weight_N != ratio_N)
