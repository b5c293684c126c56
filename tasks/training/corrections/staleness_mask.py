"""Masks tokens by how many versions ago they were sampled: tighter than the run's bound, for one loss or family."""

from __future__ import annotations

import torch

from tasks.training.algorithm_config import CorrectionConfig
from tasks.training.corrections.base import CorrectionInputs


class StalenessMask:
    """1 up to ``max_staleness`` versions, 0 beyond."""

    needs_proximal = False

    def __init__(self, config: CorrectionConfig) -> None:
        self.max_staleness = config.max_staleness

    def weights(self, inputs: CorrectionInputs) -> torch.Tensor:
        return (inputs.staleness_N <= self.max_staleness).float()
