"""How many reward replicas should there be? A pure decision, and the bookkeeping that it needs.

A replica that was asked for counts from the launch on: a cold start takes seconds, and a launch at every look in
between would start far too many. It stops counting when it registers (it then counts as running), or after a timeout.
Nobody is told to end: a replica without work ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from resources.rewards.config import RewardsConfig
from resources.rewards.queue import Backlog


def decide(config: RewardsConfig, backlog: Backlog, *, num_running: int, num_pending: int) -> int:
    """How many replicas to launch now, at least 0.

    One replica for every ``target_backlog_per_replica`` unfinished scoring requests, begun ones counting whole, between
    the floor and ``max_replicas``; less those that run and those that were asked for and have not registered. While
    some run, a backlog that they have not left waiting for ``scale_up_age_s`` asks for no more.
    """
    floor = max(config.min_replicas, int(config.start_ahead))
    wanted = -(-backlog.num_unfinished // config.target_backlog_per_replica)
    if num_running and backlog.oldest_age_s <= config.scale_up_age_s:
        wanted = min(wanted, num_running)
    return max(0, min(max(floor, wanted), config.max_replicas) - num_running - num_pending)


@dataclass(frozen=True, slots=True)
class ScalingSample:
    """One look, for the metrics."""

    at: float
    """Seconds, by the autoscaler's clock."""
    num_running: int
    num_pending: int
    num_unclaimed: int
    num_in_flight: int
    oldest_age_s: float
    num_launched: int


class Autoscaler:
    """Looks at the queue and launches replicas. ``tick`` raises whatever ``launch`` raises.

    ``running`` gives the names of the replicas that are alive, ``launch(n)`` asks for n more and returns at once.
    """

    def __init__(
        self,
        config: RewardsConfig,
        backlog: Callable[[], Backlog],
        launch: Callable[[int], None],
        running: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._backlog = backlog
        self._launch = launch
        self._running = running
        self._clock = clock
        self._asked_at: list[float] = []  # launches whose replica has not registered, oldest first
        self._known: set[str] = set()  # every replica that was ever seen running
        self.num_launched = 0
        self.num_expired = 0
        """Replicas that were asked for and never registered."""

    @property
    def num_pending(self) -> int:
        return len(self._asked_at)

    def tick(self) -> ScalingSample:
        """One look and, if need be, one launch."""
        now = self._clock()
        running = set(self._running())
        num_new = len(running - self._known)
        self._known |= running
        self._asked_at = self._asked_at[num_new:]
        on_time = [at for at in self._asked_at if now - at < self._config.launch_timeout_s]
        self.num_expired += len(self._asked_at) - len(on_time)
        self._asked_at = on_time
        backlog = self._backlog()
        num_launched = decide(self._config, backlog, num_running=len(running), num_pending=len(self._asked_at))
        for _ in range(num_launched):  # one by one: what was launched before a failure counts
            self._launch(1)
            self._asked_at.append(now)
            self.num_launched += 1
        return ScalingSample(
            at=now,
            num_running=len(running),
            num_pending=len(self._asked_at),
            num_unclaimed=backlog.num_unclaimed,
            num_in_flight=backlog.num_in_flight,
            oldest_age_s=backlog.oldest_age_s,
            num_launched=num_launched,
        )
