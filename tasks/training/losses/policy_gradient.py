"""The plain policy gradient (REINFORCE, Williams 1992): loss of a token -A log p, with p the current policy alone.

It is right on tokens of the current policy only; beside it, `corrections` bring the weight of tokens that another
policy has sampled.
"""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import LossConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.proximal import needs_recomputed, ratio_base
from tasks.training.losses.ratios import clamped_ratio


class PolicyGradient:
    """The ratio is reported, and nothing is done with it."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.needs_proximal = needs_recomputed(config)

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        ratio_N = clamped_ratio((inputs.current_logprobs_N - ratio_base(inputs, self.config)).detach())
        values_N = -inputs.advantages_N * inputs.current_logprobs_N
        return TokenLosses(values_N, ratio_N, torch.zeros_like(ratio_N, dtype=torch.bool))
