"""The estimator protocol: rows with final rewards in, one advantage per token out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tasks.training.row import TrainingRow


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator says about the R rows of an update."""

    values_RT: list[np.ndarray]
    """R arrays, float32 [T of the row]: advantage of each token (read at trained tokens only)."""
    excluded_R: list[str | None]
    """Why a row leaves loss and denominators (``unscored``, ``dead_group``); None: it is trained."""
    num_groups: dict[str, int]
    """Groups with at least one scored member, by family."""
    num_dead_groups: dict[str, int]
    """Those of them whose members all score the same (nothing to learn), by family."""
    num_unscored: int
    """Rollouts without a reward."""
    num_rollouts: int


class AdvantageEstimator(Protocol):
    """Built with its `AdvantageConfig`. Deterministic; sees all rows of the update at once, in any order of groups."""

    def estimate(self, rows: Sequence[TrainingRow]) -> Advantages: ...
