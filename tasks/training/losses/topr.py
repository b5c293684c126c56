"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286, equation 8): good trajectories are imitated without a weight,
bad ones are unlearned with one that fades as they become unlikely.

Loss of a token: -A log p where the reward of its trajectory exceeds ``positive_above``, else -sg(clip(r, 1 - low, 1 +
high)) A log p, in [0, 1] by default; r = current / behaviour (or proximal), by token or by sequence
(``behaviour_weight_level``; the paper's is ``sequence_sum``). The reward decides, not the sign of the advantage.
"""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import LossConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.cispo import weighted_log_likelihood
from tasks.training.losses.proximal import needs_recomputed, ratio_base
from tasks.training.losses.ratios import behaviour_weights


class TOPR:
    """Uses rewards beside advantages."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.needs_proximal = needs_recomputed(config)
        self.bounds = config.clip_bounds(1.0, 0.0)

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        assert inputs.rewards_N is not None, "the learner gives the reward of every token's row"
        log_ratio_N = (inputs.current_logprobs_N - ratio_base(inputs, self.config)).detach()
        ratio_N = behaviour_weights(
            log_ratio_N, inputs.sequence_N, inputs.num_sequences, self.config.behaviour_weight_level
        )
        tapered_N = ratio_N.clamp(*self.bounds)
        is_good_N = inputs.rewards_N > self.config.positive_above
        losses = weighted_log_likelihood(inputs, ratio_N, torch.where(is_good_N, torch.ones_like(ratio_N), tapered_N))
        return TokenLosses(losses.values_N, ratio_N, ~is_good_N & (tapered_N != ratio_N))
