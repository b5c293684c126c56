"""Which trajectories wait for a score of the reward pool, and until when? Which scores wait for their trajectory?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resources.environments.family import FamilyConfig
from resources.rewards.base import Score


@dataclass(frozen=True, slots=True)
class AwaitedScore:
    family: str
    since: float
    due: float


class AwaitedScores:
    """Times are seconds of any monotonic clock, passed in."""

    def __init__(self, families: Mapping[str, FamilyConfig], grace_s: float) -> None:
        """
        Args:
            grace_s: that a score may take beyond its family's ``score_deadline_s``.
        """
        self._families = families
        self._grace_s = grace_s
        self._awaited: dict[str, AwaitedScore] = {}
        self._early: dict[str, Score] = {}
        """Scores of trajectories whose end was not reported yet."""

    def __len__(self) -> int:
        return len(self._awaited)

    def expect(self, trajectory_id: str, family: str, now: float) -> None:
        due = now + self._families[family].score_deadline_s + self._grace_s
        self._awaited[trajectory_id] = AwaitedScore(family, now, due)

    def settle(self, trajectory_id: str) -> AwaitedScore | None:
        """It is not waited for any more; None when it was not."""
        return self._awaited.pop(trajectory_id, None)

    def keep_early(self, score: Score) -> None:
        """It came before its trajectory's end was reported. The first one counts."""
        self._early.setdefault(score.trajectory_id, score)

    def take_early(self, trajectory_id: str) -> Score | None:
        """The score that came before the end did, if any; it is not kept any longer."""
        return self._early.pop(trajectory_id, None)

    def take_overdue(self, now: float) -> dict[str, str]:
        """Stop waiting for what is overdue: trajectories and their families."""
        overdue = {key: awaited.family for key, awaited in self._awaited.items() if awaited.due <= now}
        for trajectory_id in overdue:
            del self._awaited[trajectory_id]
        return overdue

    def describe(self, trajectory_id: str, now: float) -> str:
        """What a trajectory waits for, for people."""
        awaited = self._awaited.get(trajectory_id)
        if awaited is None:
            return "waits for its score"
        scorer = self._families[awaited.family].scorer
        return f"waits for its score from scorer {scorer!r} since {now - awaited.since:.0f} s"
