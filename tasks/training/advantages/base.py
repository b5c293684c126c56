"""The estimator protocol: rows with final rewards in, one advantage per token out.

Legend: R rows of the update, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tasks.training.row import TrainingRow


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The R rows that an estimator sees, and what else is known of them."""

    rows: Sequence[TrainingRow]
    trainable_RT: list[np.ndarray]
    """bool [T]: tokens that are trained unless the estimator excludes the row: sampled, within the staleness bound, not
    of a cut row that is masked. Statistics over tokens are taken over these."""
    counted_R: list[bool]
    """Whether the row's reward may enter a statistic: false when all its sampled tokens are beyond the staleness
    bound."""
    penalty_RT: list[np.ndarray] | None = None
    """float32 [T]: what is taken from the reward at each sampled token (KL to the reference); None: nothing."""
    values_RT: list[np.ndarray] | None = None
    """float32 [T]: the critic's value before each sampled token; None when the run has no critic."""

    @classmethod
    def of(cls, rows: Sequence[TrainingRow]) -> AdvantageInputs:
        """Rows of which every sampled token is trained."""
        return cls(rows, [row.loss_mask.astype(np.bool_) for row in rows], [True] * len(rows))

    def penalty_of_row(self, index: int) -> float:
        return 0.0 if self.penalty_RT is None else float(self.penalty_RT[index].sum(dtype=np.float64))


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
    """Those of them whose members all score the same (nothing to learn from comparing them), by family."""
    num_unscored: int
    """Rollouts without a reward."""
    num_rollouts: int
    returns_RT: Sequence[np.ndarray | None] | None = None
    """float32 [T]: what the critic should have said at each sampled token; None for a row, or for all, when nothing is
    there to teach it."""


class AdvantageEstimator(Protocol):
    """Built with its `AdvantageConfig`. Deterministic; sees all rows of its families at once, in any order of groups.

    An estimator that reads `AdvantageInputs.values_RT` has ``needs_critic = True``, one that reads
    `TrainingRow.reward_components` ``needs_components = True``; absent means False.
    """

    def estimate(self, inputs: AdvantageInputs) -> Advantages: ...
