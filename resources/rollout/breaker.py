"""A circuit breaker for each task family: what always fails is paused, then tried with one trajectory at a time.

    closed ── breaker_failures in a row ──> open ── its pause is over ──> half-open ── the probe ends well ──> closed
                                             ^                                │
                                             └────── the probe fails ─────────┘   the pause doubles each time

A success of any trajectory closes it: one that was under way proves as much as a probe. Pure; time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class BreakerState(StrEnum):
    CLOSED = "closed"
    """Trajectories start as they come."""
    OPEN = "open"
    """None starts."""
    HALF_OPEN = "half-open"
    """One starts, and its end decides."""


@dataclass(slots=True)
class FamilyBreaker:
    """Of one task family. ``now`` is seconds of any monotonic clock."""

    threshold: int
    """Failures in a row that open it."""
    first_pause_s: float
    longest_pause_s: float
    failures_in_a_row: int = 0
    num_failures: int = 0
    """In all."""
    num_successes: int = 0
    num_openings: int = 0
    """In all."""
    failing_since: float | None = None
    """When the first failure of those in a row was heard of; None: the last one ended well."""
    last_failure: str = ""
    state: BreakerState = BreakerState.CLOSED
    _openings_in_a_row: int = 0
    _until: float = 0.0
    _probe: str | None = None

    def num_allowed(self, now: float) -> int | None:
        """Trajectories that may start now; None: as many as there are."""
        self._pass_time(now)
        match self.state:
            case BreakerState.CLOSED:
                return None
            case BreakerState.OPEN:
                return 0
            case BreakerState.HALF_OPEN:
                return 0 if self._probe is not None else 1

    def started(self, trajectory_id: str, now: float) -> None:
        """A trajectory goes to a worker."""
        self._pass_time(now)
        if self.state is BreakerState.HALF_OPEN and self._probe is None:
            self._probe = trajectory_id

    def ended(self, trajectory_id: str, failed: bool, message: str, now: float) -> None:
        """A trajectory was played, well or with a failure of its environment, engine or inline reward."""
        self._pass_time(now)
        if not failed:
            self.failures_in_a_row = self._openings_in_a_row = 0
            self.num_successes += 1
            self.failing_since = None
            self.state, self._probe = BreakerState.CLOSED, None
            return
        self.failures_in_a_row += 1
        self.num_failures += 1
        self.last_failure = message
        self.failing_since = now if self.failing_since is None else self.failing_since
        if trajectory_id == self._probe or (
            self.state is BreakerState.CLOSED and self.failures_in_a_row >= self.threshold
        ):
            self._open(now)

    def withdrawn(self, trajectory_id: str) -> None:
        """A trajectory was cancelled or lost: it proves nothing. Another one may be the probe."""
        if trajectory_id == self._probe:
            self._probe = None

    def describe(self, family: str) -> str:
        """What is wrong, in one line; empty while it is closed."""
        if self.state is BreakerState.CLOSED:
            return ""
        return f"environment of family {family!r} failed {self.failures_in_a_row} times in a row: {self.last_failure}"

    def hopeless_for_s(self, now: float) -> float:
        """Seconds since the first failure of a family none of whose trajectories ever ended well; 0 for others."""
        if self.num_successes or self.failing_since is None or self.state is BreakerState.CLOSED:
            return 0.0
        return now - self.failing_since

    def due_in_s(self, now: float) -> float | None:
        """Seconds until it lets something through again; None when it is not open."""
        return max(0.0, self._until - now) if self.state is BreakerState.OPEN else None

    def stats(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "state": str(self.state),
            "failures_in_a_row": self.failures_in_a_row,
            "num_failures": self.num_failures,
            "num_openings": self.num_openings,
            "last_failure": self.last_failure,
        }

    def _open(self, now: float) -> None:
        pause_s = min(self.longest_pause_s, self.first_pause_s * 2 ** min(self._openings_in_a_row, 16))
        self.state, self._probe, self._until = BreakerState.OPEN, None, now + pause_s
        self.num_openings += 1
        self._openings_in_a_row += 1

    def _pass_time(self, now: float) -> None:
        if self.state is BreakerState.OPEN and now >= self._until:
            self.state = BreakerState.HALF_OPEN
