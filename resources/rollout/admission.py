"""Admission: how many groups of each family may start now, and may the engines load a version? Pure arithmetic.

Per family f, in groups (the rule of AReaL, arXiv 2505.24298, section 5.1, here per family)::

    start_f <= min(max_concurrent_f - running_f,
                   budget_f + redundant_f - accepted_f - running_f)
    budget_f = sum of the quotas of f over the batches 0 .. version + max_staleness

where a quota is ``groups_per_iteration`` (unless a curriculum moves it), so that ``budget_f`` is
``(max_staleness + version + 1) * groups_f``, and no batch counts that the run will not take, nor (in a pipeline with a
`LogicalSchedule`) one that comes after the first incomplete one.
A group is reserved whole and runs until it is scored. ``accepted_f`` counts groups scored and kept, trained or not.
Evicted, failed and replaced groups leave both counts. docs/staleness.md argues what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from resources.rollout.config import RolloutConfig
from resources.rollout.group_state import FamilyState
from resources.rollout.logical_time import LogicalSchedule
from resources.rollout.shares import Shares


class Admission:
    """Counts over the families and shares of the gate, which it reads and never changes."""

    def __init__(
        self, families: Mapping[str, FamilyState], shares: Shares, config: RolloutConfig, num_batches: int | None
    ) -> None:
        """
        Args:
            num_batches: batches that will ever be taken; None: no end is known.
        """
        self.version = 0
        """The version the engines serve."""
        self._families, self._shares, self._num_batches = families, shares, num_batches
        self._max_staleness = config.max_staleness
        self._schedule = LogicalSchedule.of(config)

    def admissible(self, family_name: str) -> int:
        """Groups that may start now."""
        family = self._families[family_name]
        num_running = len(family.running)
        return min(
            family.config.max_concurrent_groups - num_running,
            self.budget(family_name) + family.config.redundant_groups - self.accepted(family_name) - num_running,
        )

    def is_full(self, family_name: str) -> bool:
        """Redundant groups start only beside wanted ones, never once the wanted ones are all scored."""
        return self.accepted(family_name) >= self.budget(family_name)

    def budget(self, family_name: str) -> int:
        """Groups of a family that may ever be accepted up to the version served now."""
        return self._shares.planned(family_name, self._num_open_batches())

    def accepted(self, family_name: str) -> int:
        """Groups scored and kept, trained or not; an update whose batch was not taken here counts as a full share."""
        return self._shares.families[family_name].trained + len(self._families[family_name].complete)

    def may_load(self, version: int) -> bool:
        """Whether the pipeline lets the engines switch to a version now."""
        num_complete = self._num_complete_batches()
        ends = self._num_batches is not None and num_complete >= self._num_batches
        return self._schedule is None or ends or self._schedule.may_load(version, num_complete)

    def _num_open_batches(self) -> int:
        """Batches that what starts under the version served now may be trained in, and those before them."""
        number = self._max_staleness + self.version + 1
        if self._schedule is not None:
            number = self._schedule.num_open(self.version, self._num_complete_batches())
        return number if self._num_batches is None else min(number, self._num_batches)

    def _num_complete_batches(self) -> int:
        """Batches that every family has its groups for, those taken included."""
        number = self._shares.next_batch
        while all(self.accepted(name) >= self._shares.planned(name, number + 1) for name in self._families):
            number += 1
        return number
