"""M2PO: masks the tokens with the largest squared log-ratios until the mean of the rest is within a bound
(arXiv 2510.01161, section 5.2).

Taken here over all trained tokens and once, before the first step, with proximal / behaviour. The paper's algorithm 1
takes current / behaviour, and only tokens on which PPO's clip could act: A > 0 and r > 1, or A < 0 and r < 1.
"""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import CorrectionConfig
from tasks.training.corrections.base import CorrectionInputs


class M2PO:
    """1 for the tokens that stay, 0 for those masked: the largest set of smallest (log w)^2 whose mean is at most
    ``second_moment``, w = proximal / behaviour. Tokens of equal size stay or go together."""

    needs_proximal = True

    def __init__(self, config: CorrectionConfig) -> None:
        self.second_moment = config.second_moment

    def weights(self, inputs: CorrectionInputs) -> torch.Tensor:
        assert inputs.log_ratio_N is not None, "the learner computes proximal logprobs for this correction"
        squared_N = inputs.log_ratio_N.double().square()
        if not squared_N.numel():
            return torch.ones_like(inputs.log_ratio_N)
        ascending_N = squared_N.sort().values
        counts_N = torch.arange(1, len(ascending_N) + 1, device=squared_N.device, dtype=torch.float64)
        # The means of ever larger sets of smallest values never fall, so the sets that fit are a prefix.
        fits_N = ascending_N.cumsum(0) / counts_N <= self.second_moment
        # A tie that fits only in part goes as a whole.
        last_of_ties_N = torch.ones_like(fits_N)
        last_of_ties_N[:-1] = ascending_N[:-1] < ascending_N[1:]
        stays_N = fits_N & last_of_ties_N
        largest = ascending_N[stays_N][-1] if bool(stays_N.any()) else squared_N.new_full((), -1.0)
        return (squared_N <= largest).float()
