"""GSPO: one ratio per sequence, the geometric mean of its tokens', clipped as a whole (arXiv 2507.18071, section 4).

Loss of a token: -min(s A, clip(s, 1 - low, 1 + high) A) with s the sequence's ratio in value, and in gradient s times
that of the token's own log-probability (the paper's GSPO-token, equation 14): with one advantage per sequence it is
GSPO, and advantages that differ by turn are allowed. The paper's mean over sequences is the normaliser
``sequence_mean``.
"""

from __future__ import annotations

from tasks.training.algorithm_config import LossConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.ppo_clip import clipped_surrogate
from tasks.training.losses.proximal import needs_recomputed, ratio_base
from tasks.training.losses.ratios import behaviour_weights


class GSPO:
    """Ratios of sequences lie much closer to 1 than those of tokens, hence the narrow default bounds."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.needs_proximal = needs_recomputed(config)
        self.bounds = config.clip_bounds(3e-4, 4e-4)

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        log_ratio_N = (inputs.current_logprobs_N - ratio_base(inputs, self.config)).detach()
        ratio_N = behaviour_weights(log_ratio_N, inputs.sequence_N, inputs.num_sequences, "sequence_mean")
        # 1 in value, with the gradient of the token's own log-probability.
        own_N = 1.0 + inputs.current_logprobs_N - inputs.current_logprobs_N.detach()
        values_N, clipped_N = clipped_surrogate(
            ratio_N * own_N, inputs.advantages_N, self.bounds, self.config.dual_clip
        )
        return TokenLosses(values_N, ratio_N, clipped_N)
