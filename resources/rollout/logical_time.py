"""Logical time of a run: which batch is generated under which version, whatever the clock says.

A run's *tag* is the number of a batch, after the tags of reactors (arXiv 2312.04704, section 3): what happens at a tag
may depend on what lies at earlier tags and on nothing else. Two rules make that so:

- batch b is begun when batch b - 1 is complete and version ``b - lag`` is loaded;
- version n is loaded when batch ``n + lag - 1``, the last one that is generated under version n - 1, is complete.

So the whole of batch b is sampled under version ``max(0, b - lag)``: the two rules never wait for each other, and no
trajectory ever sees a load. ``lag`` 1 is the one-off pipeline; ``deterministic`` gives every pipeline the schedule of
its bound. Within a tag there is a static order, that of the configuration's families and of their prompts: what
completes in another order is put into it. Pure arithmetic: the staleness gate asks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from resources.rollout.config import RolloutConfig
from resources.rollout.group_state import Group


@dataclass(frozen=True, slots=True)
class LogicalSchedule:
    """``lag``: versions by which every batch but the first ones is older than the learner that trains on it."""

    lag: int

    @classmethod
    def of(cls, config: RolloutConfig) -> LogicalSchedule | None:
        """The schedule that a configuration asks for; None: the staleness bound alone paces rollouts."""
        is_scheduled = config.deterministic or config.pipeline == "one_off"
        return cls(config.max_staleness) if is_scheduled else None

    def sampled_under(self, batch: int) -> int:
        """Version that samples every token of a batch."""
        return max(0, batch - self.lag)

    def num_open(self, version: int, num_complete: int) -> int:
        """Batches that may have been begun while ``version`` is loaded and the first ``num_complete`` are complete."""
        return min(version + self.lag + 1, num_complete + 1)

    def may_load(self, version: int, num_complete: int) -> bool:
        """Whether everything that the version before has to sample is there."""
        return num_complete >= version + self.lag


def in_static_order(groups: Iterable[Group]) -> list[Group]:
    """Groups of one family and batch in the order in which they were first issued, whichever was complete first."""
    return sorted(groups, key=lambda group: (len(group.group_id), group.group_id))
