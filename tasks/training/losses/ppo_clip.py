"""PPO's clipped ratio (arXiv 1707.06347, equation 7), with asymmetric bounds (DAPO's clip-higher, arXiv 2503.14476,
section 3.1) and, if wanted, dual clip (arXiv 1912.09729, equation 3).

Loss of a token: -min(r A, clip(r, 1 - low, 1 + high) A) with r = current / behaviour (or proximal, by ``ratio_to``);
with dual clip c and A < 0 at most -c A.
"""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import LossConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.proximal import needs_recomputed, ratio_base
from tasks.training.losses.ratios import clamped_ratio

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class PPOClip:
    """Against the behaviour policy, a stale token may start outside the clip, on the side where it gives no
    gradient."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.needs_proximal = needs_recomputed(config)
        self.bounds = config.clip_bounds(CLIP_LOW, CLIP_HIGH)

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        ratio_N = clamped_ratio(inputs.current_logprobs_N - ratio_base(inputs, self.config))
        values_N, clipped_N = clipped_surrogate(ratio_N, inputs.advantages_N, self.bounds, self.config.dual_clip)
        return TokenLosses(values_N, ratio_N.detach(), clipped_N)


def clipped_surrogate(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, bounds: tuple[float, float], dual_clip: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each token [N], and whether a clip is active [N, bool]."""
    plain_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(*bounds) * advantages_N
    values_N = torch.maximum(plain_N, bounded_N)
    clipped_N = bounded_N > plain_N
    if dual_clip is not None:
        highest_N = -dual_clip * advantages_N
        exceeds_N = (advantages_N < 0) & (values_N > highest_N)
        values_N = torch.where(exceeds_N, highest_N, values_N)
        clipped_N = clipped_N | exceeds_N
    return values_N, clipped_N.detach()
