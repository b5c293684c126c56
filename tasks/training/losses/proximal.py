"""Where a loss finds the policy that its ratio is taken to: the behaviour policy, or the proximal one.

The proximal policy is the learner when the update starts. Its log-probabilities come from a forward pass before the
first step (``recomputed``), or, without one, from a line between behaviour and current log-probabilities
(``loglinear``): log p_prox = log p_b + a (log p - log p_b) with a = (v_prox - v_b) / (v - v_b), v the version that the
update makes, v_prox = v - 1 and v_b the version that sampled (AReaL's approximation of the proximal policy; the policy
is taken to have moved by the same amount with each version).
"""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import LossConfig
from tasks.training.losses.base import LossInputs


def ratio_base(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """Log-probabilities of the policy in the denominator of the ratio, float32 [N], no gradient."""
    return inputs.behaviour_logprobs_N if config.ratio_to == "behaviour" else proximal_logprobs(inputs, config)


def proximal_logprobs(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """float32 [N], no gradient."""
    if config.proximal == "loglinear":
        assert inputs.staleness_N is not None, "the learner gives the staleness of every token"
        return loglinear(inputs.behaviour_logprobs_N, inputs.current_logprobs_N.detach(), inputs.staleness_N)
    assert inputs.proximal_logprobs_N is not None, "the learner computes proximal logprobs for this loss"
    return inputs.proximal_logprobs_N


def loglinear(behaviour_N: torch.Tensor, current_N: torch.Tensor, staleness_N: torch.Tensor) -> torch.Tensor:
    """The line at a = s / (s + 1) for staleness s: at staleness 0 it is the behaviour policy."""
    staleness_N = staleness_N.float()
    return behaviour_N + staleness_N / (staleness_N + 1.0) * (current_N - behaviour_N)


def needs_recomputed(config: LossConfig) -> bool:
    """Whether a loss with ``ratio_to`` needs the forward pass before the first step."""
    return config.ratio_to == "proximal" and config.proximal == "recomputed"
