"""Decoupled PPO: the trust region around a proximal policy, the importance weight for the behaviour policy
(arXiv 2110.00641; in asynchronous RL of language models AReaL, arXiv 2505.24298, section 5.2).

Loss of a token: w * -min(u A, clip(u, 1 - low, 1 + high) A) with u = current / proximal and w = proximal / behaviour,
a constant, truncated from above. The proximal policy is the learner when the update starts, so every token starts at u
= 1, inside the clip, however stale it is (see `losses.proximal` for where its log-probabilities come from).
"""

from __future__ import annotations

from tasks.training.algorithm_config import LossConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.ppo_clip import CLIP_HIGH, CLIP_LOW, clipped_surrogate
from tasks.training.losses.proximal import proximal_logprobs
from tasks.training.losses.ratios import behaviour_weights, clamped_ratio, sequence_log_ratios


class DecoupledPPO:
    """Current policy in u (with gradient), proximal in u and w, behaviour in w only."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.needs_proximal = config.proximal == "recomputed"
        self.bounds = config.clip_bounds(CLIP_LOW, CLIP_HIGH)

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        proximal_N = proximal_logprobs(inputs, self.config)
        ratio_N = clamped_ratio(inputs.current_logprobs_N - proximal_N)
        values_N, clipped_N = clipped_surrogate(ratio_N, inputs.advantages_N, self.bounds, self.config.dual_clip)

        log_weight_N = (proximal_N - inputs.behaviour_logprobs_N).detach()
        weight_N = behaviour_weights(
            log_weight_N, inputs.sequence_N, inputs.num_sequences, self.config.behaviour_weight_level
        )
        truncated_N = weight_N.clamp(max=self.config.behaviour_weight_cap)
        sums_S, means_S = sequence_log_ratios(log_weight_N, inputs.sequence_N, inputs.num_sequences)
        return TokenLosses(
            truncated_N * values_N,
            ratio_N.detach(),
            clipped_N,
            sums={
                "behaviour_weight/mean": weight_N.sum(),
                "behaviour_weight/truncated_share": (weight_N > truncated_N).float().sum(),
                "behaviour_weight/sequence_sum": clamped_ratio(sums_S).index_select(0, inputs.sequence_N).sum(),
                "behaviour_weight/sequence_mean": clamped_ratio(means_S).index_select(0, inputs.sequence_N).sum(),
            },
        )
