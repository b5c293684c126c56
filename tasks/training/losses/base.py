"""The loss protocol: the trained tokens of a micro-batch in, one loss value per token out.

Only trained tokens are ever here: a masked token is absent, so no mask can be wrong. Legend: N trained tokens of the
micro-batch, S sequences in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Which log-probabilities a term uses is explicit: current (with gradient), behaviour, proximal and reference
    (without)."""

    current_logprobs_N: torch.Tensor
    """float32 [N], with gradient: the learner now, at the row's own temperature."""
    behaviour_logprobs_N: torch.Tensor
    """float32 [N]: the engine that sampled the token."""
    proximal_logprobs_N: torch.Tensor | None
    """float32 [N]: the learner when the update started; None unless the loss asks for it (`needs_proximal`)."""
    advantages_N: torch.Tensor
    """float32 [N]"""
    sequence_N: torch.Tensor
    """int64 [N]: index of the row within the micro-batch; a row is never split over micro-batches."""
    num_sequences: int
    reference_logprobs_N: torch.Tensor | None = None
    """float32 [N]: the frozen reference, at the row's own temperature; None when the run has no reference."""
    entropy_N: torch.Tensor | None = None
    """float32 [N]: entropy of the current policy where the token was sampled; with gradient only if the loss
    `needs_entropy_gradient`."""
    rewards_N: torch.Tensor | None = None
    """float32 [N]: final reward of the token's row."""
    staleness_N: torch.Tensor | None = None
    """int64 [N]: the learner's version when the update started, minus the version that sampled the token."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    values_N: torch.Tensor
    """float32 [N], with gradient. The denominator is not the loss's business (see `normalisers`)."""
    ratio_N: torch.Tensor
    """float32 [N], no gradient: the ratio that this loss clips."""
    clipped_N: torch.Tensor
    """bool [N]: the clip is active, the token gives no gradient."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Scalars: further per-token quantities summed over the micro-batch, reported as means over trained tokens."""
    counts: dict[str, int] = field(default_factory=dict)
    """Over how many tokens a sum was taken; a name that is absent: all N."""


class Loss(Protocol):
    """Built with its `LossConfig`.

    A loss may also have ``needs_reference`` (the run must have a reference policy) and ``needs_entropy_gradient``;
    absent means False.
    """

    needs_proximal: bool
    """The learner then computes log-probabilities of all rows before the first step."""

    def token_losses(self, inputs: LossInputs) -> TokenLosses: ...
