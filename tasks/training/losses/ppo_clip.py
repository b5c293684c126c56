"""PPO's clipped ratio on behaviour log-probabilities (arXiv 1707.06347, equation 7), with asymmetric bounds
(DAPO's clip-higher, arXiv 2503.14476, section 3.1).

Loss of a token: -min(r A, clip(r, 1 - low, 1 + high) A) with r = current / behaviour.
"""

from __future__ import annotations

import torch

from tasks.training.config import LossConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.ratios import clamped_ratio


class PPOClip:
    """A stale token may start outside the clip, on the side where it gives no gradient."""

    needs_proximal = False

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        ratio_N = clamped_ratio(inputs.current_logprobs_N - inputs.behaviour_logprobs_N)
        values_N, clipped_N = clipped_surrogate(
            ratio_N, inputs.advantages_N, self.config.clip_low, self.config.clip_high
        )
        return TokenLosses(values_N, ratio_N.detach(), clipped_N)


def clipped_surrogate(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each token [N], and whether its clip is active [N, bool]."""
    plain_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_N
    return torch.maximum(plain_N, bounded_N), (bounded_N > plain_N).detach()
