"""What is known of an update's rows before its first step: advantages, masks, values; and what of it the steps need.

Legend: R rows, T tokens of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.algorithms import Algorithms
from tasks.training.masks import TrainingMasks, derive_masks, is_beyond_bound, trainable_tokens
from tasks.training.packing import PackableSequence
from tasks.training.reference import reward_penalties
from tasks.training.row import TrainingRow

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainableRows:
    """R rows that have at least one trained token each."""

    sequences: list[PackableSequence]
    families: list[str]
    advantages_RT: list[np.ndarray]
    """float32 [T] each"""
    behaviour_RT: list[np.ndarray]
    """float32 [T] each"""
    versions_RT: list[np.ndarray]
    """int32 [T] each"""
    num_families: int
    """Families that share the loss equally."""
    version: int = 0
    """The learner's version when the update starts."""
    rewards_R: list[float] | None = None
    """Final reward of each row; None: 0."""
    values_RT: list[np.ndarray] | None = None
    """float32 [T] each: the critic's values when the update starts; None without a critic."""
    returns_RT: list[np.ndarray | None] | None = None
    """float32 [T] each: what the critic should have said; None for a row that teaches it nothing."""
    reference_RT: list[np.ndarray] | None = None
    """float32 [T] each: log-probabilities of sampled tokens under the reference policy; None: nothing asks for them."""

    def followed_by(self, other: TrainableRows) -> TrainableRows:
        """These rows and then those of ``other``, of the same update."""
        assert self.version == other.version, ("rows of one update", self.version, other.version)
        return replace(
            self,
            sequences=self.sequences + other.sequences,
            families=self.families + other.families,
            advantages_RT=self.advantages_RT + other.advantages_RT,
            behaviour_RT=self.behaviour_RT + other.behaviour_RT,
            versions_RT=self.versions_RT + other.versions_RT,
            rewards_R=_both(self.rewards_R, other.rewards_R),
            values_RT=_both(self.values_RT, other.values_RT),
            returns_RT=_both(self.returns_RT, other.returns_RT),
            reference_RT=_both(self.reference_RT, other.reference_RT),
        )


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """R rows with all that is computed of them before the first step."""

    rows: list[TrainingRow]
    advantages: Advantages
    masks: TrainingMasks
    version: int
    values_RT: list[np.ndarray] | None
    """As in `TrainableRows`, of all rows."""
    reference_RT: list[np.ndarray] | None
    """As in `TrainableRows`, of all rows."""

    @property
    def families(self) -> set[str]:
        return {row.family for row in self.rows}

    def trainable(self, num_families: int) -> TrainableRows:
        """Those rows that have a trained token."""
        rows, advantages, values_RT, reference_RT = self.rows, self.advantages, self.values_RT, self.reference_RT
        trained_RT, returns_RT = self.masks.trained_RT, self.advantages.returns_RT
        live = [index for index, mask in enumerate(trained_RT) if mask.any()]
        return TrainableRows(
            sequences=[PackableSequence(rows[i].token_ids, trained_RT[i], rows[i].temperature) for i in live],
            families=[rows[i].family for i in live],
            advantages_RT=[advantages.values_RT[i] for i in live],
            behaviour_RT=[rows[i].behaviour_logprobs for i in live],
            versions_RT=[rows[i].token_versions for i in live],
            num_families=num_families,
            version=self.version,
            rewards_R=[rows[i].reward or 0.0 for i in live],
            values_RT=None if values_RT is None else [values_RT[i] for i in live],
            reference_RT=None if reference_RT is None else [reference_RT[i] for i in live],
            returns_RT=None if values_RT is None else [None if returns_RT is None else returns_RT[i] for i in live],
        )

    @classmethod
    def joined(cls, parts: Sequence[PreparedRows]) -> PreparedRows:
        """Parts of one update that hold whole groups, as one."""
        advantages = [part.advantages for part in parts]
        masked: Counter[str] = Counter()
        num_groups: Counter[str] = Counter()
        num_dead: Counter[str] = Counter()
        for part in parts:
            masked.update(part.masks.masked_tokens)
            num_groups.update(part.advantages.num_groups)
            num_dead.update(part.advantages.num_dead_groups)
        returns = [
            [None] * len(part.rows) if part.advantages.returns_RT is None else part.advantages.returns_RT
            for part in parts
        ]
        return cls(
            rows=[row for part in parts for row in part.rows],
            advantages=Advantages(
                values_RT=[values for each in advantages for values in each.values_RT],
                excluded_R=[cause for each in advantages for cause in each.excluded_R],
                num_groups=dict(num_groups),
                num_dead_groups=dict(num_dead),
                num_unscored=sum(each.num_unscored for each in advantages),
                num_rollouts=sum(each.num_rollouts for each in advantages),
                returns_RT=[row for each in returns for row in each],
            ),
            masks=TrainingMasks([mask for part in parts for mask in part.masks.trained_RT], dict(masked)),
            version=parts[0].version,
            values_RT=_all([part.values_RT for part in parts]),
            reference_RT=_all([part.reference_RT for part in parts]),
        )


def prepare_rows(
    rows: Sequence[TrainingRow],
    version: int,
    max_staleness: int | None,
    truncated_rows: Literal["train", "mask"],
    algorithms: Algorithms,
    *,
    values_RT: list[np.ndarray] | None = None,
    reference_RT: list[np.ndarray] | None = None,
) -> PreparedRows:
    """Advantages and masks of whole groups, at the learner's ``version``. Arguments as in `Learner.update`,
    `TrainingConfig` and `PreparedRows`."""
    bounds = [algorithms.of(row.family).staleness_bound(max_staleness) for row in rows]
    counted = [not is_beyond_bound(row, version, bound) for row, bound in zip(rows, bounds, strict=True)]
    trainable = [trainable_tokens(row, version, max_staleness, truncated_rows) for row in rows]
    inputs = AdvantageInputs(
        rows=rows,
        trainable_RT=[mask & is_counted for mask, is_counted in zip(trainable, counted, strict=True)],
        counted_R=counted,
        penalty_RT=None if reference_RT is None else reward_penalties(algorithms, rows, reference_RT),
        values_RT=values_RT,
    )
    advantages = algorithms.estimate(inputs)
    masks = derive_masks(inputs, advantages.excluded_R, truncated_rows)
    return PreparedRows(list(rows), advantages, masks, version, values_RT, reference_RT)


def _both(first: list[T] | None, second: list[T] | None) -> list[T] | None:
    assert (first is None) == (second is None), "parts of one update know the same"
    return None if first is None or second is None else first + second


def _all(parts: Sequence[list[np.ndarray] | None]) -> list[np.ndarray] | None:
    known = [part for part in parts if part is not None]
    assert len(known) in (0, len(parts)), "parts of one update know the same"
    return [values for part in known for values in part] if known else None
