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
    """Which log-probabilities a term uses is explicit: current (with gradient), behaviour, proximal (both without)."""

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


class Loss(Protocol):
    """Built with its `LossConfig`."""

    needs_proximal: bool

    def token_losses(self, inputs: LossInputs) -> TokenLosses: ...
