"""When does the learner give up waiting for a batch, or for a load, and what does it say then?

| a wait ends                             | at                                                     | raising          |
|-----------------------------------------|--------------------------------------------------------|------------------|
| its stage has no more time              | the timeout that it asked for                          | DeadlineExceeded |
| nothing was scored                      | ``stall_limit_s`` (said aloud after ``stall_after_s``) | DeadlineExceeded |
| a family that is missing never worked   | ``never_worked_limit_s`` (batches only)                | DeadlineExceeded |
"""

from __future__ import annotations

from collections.abc import Callable

from resources.failures import DeadlineExceeded
from resources.rollout.config import RolloutConfig
from resources.rollout.dispatch import Dispatcher
from resources.rollout.queue_events import QueueEvents
from resources.rollout.staleness import StalenessGate

LOOK_S = 1.0
"""Longest time between two looks at a wait, in seconds: time passes without an event."""


class LearnerWait:
    """One wait, from its making on. ``clock``: monotonic seconds."""

    def __init__(
        self,
        config: RolloutConfig,
        gate: StalenessGate,
        dispatcher: Dispatcher,
        events: QueueEvents,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._gate, self._dispatcher, self._events = config, gate, dispatcher, events
        self._clock, self._start = clock, clock()
        self._stalled = False

    @property
    def waited_s(self) -> float:
        return self._clock() - self._start

    def check_batch(self, version: int, timeout_s: float) -> float:
        """Seconds until the next look. Raises DeadlineExceeded, naming what batch ``version`` lacks."""
        self._check_hope(version)
        waited, quiet = self.waited_s, self._quiet_s()
        if waited >= timeout_s:
            raise DeadlineExceeded(f"batch {version} is not complete after {waited:.0f} s: {self._events.missing()}")
        silence = f"batch {version}: nothing was scored for {quiet:.0f} s"
        if quiet >= self._config.stall_after_s and not self._stalled:
            self._events.log(f"{silence}: {self._events.missing()}")
        if quiet >= self._config.stall_limit_s:
            raise DeadlineExceeded(f"{silence}: {self._events.missing()}")
        self._stalled = quiet >= self._config.stall_after_s
        return min(timeout_s - waited, self._config.stall_after_s, LOOK_S)

    def check_load(self, version: int, timeout_s: float) -> float:
        """Seconds until the next look. Raises DeadlineExceeded, naming what has to be sampled before the load."""
        waited, quiet = self.waited_s, self._quiet_s()
        if waited >= timeout_s or quiet >= self._config.stall_limit_s:
            raise DeadlineExceeded(
                f"version {version} waits for its load since {waited:.0f} s, and nothing was scored for "
                f"{quiet:.0f} s: {self._events.missing()}"
            )
        return min(timeout_s - waited, LOOK_S)

    def _quiet_s(self) -> float:
        return self._clock() - max(self._start, self._events.last_progress)

    def _check_hope(self, version: int) -> None:
        """An outage is waited out; what never worked is a mistake, and nobody need wait for its stall limit."""
        now = self._clock()
        for name in self._gate.missing():
            breaker = self._dispatcher.breaker(name)
            if breaker.hopeless_for_s(now) >= self._config.never_worked_limit_s:
                raise DeadlineExceeded(
                    f"batch {version}: no trajectory of family {name!r} has ended well since the start, for "
                    f"{breaker.hopeless_for_s(now):.0f} s (rollout.never_worked_limit_s); {breaker.describe(name)}"
                )
