"""The correction protocol: what is known of trained tokens before the first step in, one weight per token out.

A correction answers for what lies between the policy that sampled and the learner with which the update starts:
staleness, and the numerical difference of engine and learner. Both are constants of the update, so weights are computed
once, over all trained tokens of the rows that it is for, and do not depend on micro-batches. Legend: N those tokens, S
their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class CorrectionInputs:
    log_ratio_N: torch.Tensor | None
    """float32 [N]: proximal minus behaviour log-probability; None unless some correction asks (`needs_proximal`)."""
    staleness_N: torch.Tensor
    """int64 [N]: the learner's version when the update starts, minus the version that sampled the token."""
    sequence_N: torch.Tensor
    """int64 [N]: index of the token's row."""
    num_sequences: int


class Correction(Protocol):
    """Built with its `CorrectionConfig`."""

    needs_proximal: bool

    def weights(self, inputs: CorrectionInputs) -> torch.Tensor:
        """float32 [N], finite and not negative; 0 masks the token. The denominator stays what it was, so that masking
        some tokens does not inflate the rest."""
        ...
