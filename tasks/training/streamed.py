"""An update that began before its batch was whole: which groups are in it, and whether they are the batch's.

What arrives early is a promise of the group queue; what counts is the batch. A group that turns out otherwise in the
batch (or is not in it) costs the work done so far, never a wrong step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.training.prepared import PreparedRows
from tasks.training.row import TrainingRow
from tasks.training.streamed_steps import StreamedSteps

GroupDigest = tuple[tuple[str, str, float | None, int], ...]


@dataclass(slots=True)
class StreamedUpdate:
    """Groups of batch ``version`` whose gradients are under way."""

    version: int
    max_staleness: int | None
    prepare: Callable[[Sequence[TrainingRow]], PreparedRows]
    steps: StreamedSteps
    parts: list[PreparedRows] = field(default_factory=list)
    seconds: float = 0.0
    """Spent before the batch was whole."""
    groups: dict[str, GroupDigest] = field(default_factory=dict)

    def add(self, rows: Sequence[TrainingRow]) -> None:
        """Whole groups that are not in it yet. Raises ValueError for a group that is."""
        started = time.perf_counter()
        groups = group_digests(rows)
        if repeated := sorted(groups.keys() & self.groups.keys()):
            raise ValueError(f"update {self.version}: the groups {repeated} were added before; a group is added whole")
        prepared = self.prepare(rows)
        # The number of families is not asked before the batch is whole.
        self.steps.add(prepared.trainable(num_families=1))
        self.parts.append(prepared)
        self.groups |= groups
        self.seconds += time.perf_counter() - started

    def is_part_of(self, rows: Sequence[TrainingRow], max_staleness: int | None) -> bool:
        """Whether the batch holds every group exactly as it was added."""
        batch = group_digests(rows)
        same = all(batch.get(name) == digest for name, digest in self.groups.items())
        return same and self.max_staleness == max_staleness

    def completed(self, rows: Sequence[TrainingRow]) -> PreparedRows:
        """All rows of the batch, those that were not there yet added now."""
        if rest := [row for row in rows if row.group_id not in self.groups]:
            self.add(rest)
        return PreparedRows.joined(self.parts)

    def done(self) -> dict[str, Any]:
        """Metrics of what was done so far."""
        return {
            "num_streamed_groups": len(self.groups),
            "tokens/streamed": self.steps.num_tokens_run,
            "time/streamed_s": self.seconds,
        }


def group_digests(rows: Sequence[TrainingRow]) -> dict[str, GroupDigest]:
    """What makes each group what it is: its rows, and their rewards. Rows themselves never change."""
    groups: dict[str, GroupDigest] = {}
    for row in rows:
        digest = (row.trajectory_id, row.rollout_id, row.reward, len(row.token_ids))
        groups[row.group_id] = (*groups.get(row.group_id, ()), digest)
    return groups
