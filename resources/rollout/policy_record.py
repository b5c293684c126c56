"""Which policies have sampled a trajectory so far?"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from resources.engines.base import Generation
from resources.rollout.messages import PolicyCounts
from resources.trajectories.trajectory import Turn


class PolicyRecord:
    """Grows turn by turn. With slots: every waiting trajectory has one."""

    __slots__ = ("_counts", "_oldest_version")

    def __init__(self) -> None:
        self._oldest_version: int | None = None
        self._counts: Counter[str] = Counter()

    def note(
        self, drawn: Literal["current", "stale"], generation: Generation, before: Turn | None, num_held: int
    ) -> int | None:
        """Book the answer to one turn. Returns its oldest version where that is news: the first of the trajectory, or
        older than all before.

        Args:
            drawn: which engines the turn was meant for.
            before: the turn before it.
            num_held: tokens of the history whose KV the engine of that turn has.
        """
        counts, num_tokens = self._counts, len(generation.token_ids)
        counts["stale_turns"] += generation.stale_tokens > 0
        counts["stale_tokens"] += generation.stale_tokens
        counts["unserved_turns"] += drawn == "stale" and generation.stale_tokens < num_tokens
        if before is not None and before.engine != generation.engine:
            counts["moved_turns"] += 1
            counts["prefilled_again_tokens"] += max(0, num_held - generation.cached_tokens)
        if not num_tokens:
            return None
        oldest = int(generation.versions.min())
        if self._oldest_version is not None and oldest >= self._oldest_version:
            return None
        self._oldest_version = oldest
        return oldest

    def counts(self) -> PolicyCounts:
        return PolicyCounts(**self._counts)
