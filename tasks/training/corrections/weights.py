"""Importance weights proximal / behaviour: truncated, masked outside a range, or used as a mask only.

Truncated: "truncated importance sampling" between engine and learner (Yao et al., "Your efficient RL framework secretly
brings you off-policy RL training", 2025). Masked outside a range, kept as a weight inside: IcePop (arXiv 2510.18855,
section 2.3.2). As a mask only: "masked importance sampling". By token, or by sequence (sum, or geometric mean).
"""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import WEIGHT_BOUNDS, CorrectionConfig, WeightLevel
from tasks.training.corrections.base import CorrectionInputs
from tasks.training.losses.ratios import behaviour_weights


class TruncatedWeight:
    """clamp(w, low, high); by default at most 2."""

    needs_proximal = True
    default_bounds = WEIGHT_BOUNDS["truncated_weight"]

    def __init__(self, config: CorrectionConfig) -> None:
        self.level: WeightLevel = config.level
        self.low, self.high = config.bounds(*self.default_bounds)

    def weights(self, inputs: CorrectionInputs) -> torch.Tensor:
        return self._ratio(inputs).clamp(self.low, self.high)

    def _ratio(self, inputs: CorrectionInputs) -> torch.Tensor:
        assert inputs.log_ratio_N is not None, "the learner computes proximal logprobs for this correction"
        return behaviour_weights(inputs.log_ratio_N, inputs.sequence_N, inputs.num_sequences, self.level)

    def _is_inside(self, ratio_N: torch.Tensor) -> torch.Tensor:
        return (ratio_N >= self.low) & (ratio_N <= self.high)


class MaskedWeight(TruncatedWeight):
    """w where low <= w <= high, 0 elsewhere; by default 0.5 to 5."""

    default_bounds = WEIGHT_BOUNDS["masked_weight"]

    def weights(self, inputs: CorrectionInputs) -> torch.Tensor:
        ratio_N = self._ratio(inputs)
        return ratio_N * self._is_inside(ratio_N)


class RatioMask(TruncatedWeight):
    """1 where low <= w <= high, 0 elsewhere; by default 0.5 to 5."""

    default_bounds = WEIGHT_BOUNDS["ratio_mask"]

    def weights(self, inputs: CorrectionInputs) -> torch.Tensor:
        return self._is_inside(self._ratio(inputs)).float()
