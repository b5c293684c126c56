"""One reward replica: claim, score, answer, and end when there is nothing left to do.

One thread, one loop; no wait in it is longer than `LOOK_S`. It

    looks at                 for
    the queue                micro-batches, until one waiting request per scorer process is at hand
    its scorer processes     scores; every one is killed at its deadline
    its leases               renewal at a third of their time, as long as it scores
    the run's heartbeat      its end, or its silence
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from resources.rewards.base import Score
from resources.rewards.config import RewardsConfig
from resources.rewards.leases import Claim
from resources.rewards.liveness import REPLICAS, RUN_HEARTBEAT, Beacon, Watch
from resources.rewards.queue import RewardQueue
from resources.rewards.scorer_pool import ScorerPool, ScoringBackend

logger = logging.getLogger(__name__)

EndReason = Literal["idle", "max_lifetime", "run_ended", "run_silent", "stopped"]
LOOK_S = 0.25
"""Longest wait for a score, in seconds: leases, heartbeats and the stop signal are looked at in between."""


@dataclass(slots=True)
class ReplicaReport:
    """What a replica did in its life."""

    owner: str
    num_batches: int = 0
    num_scores: int = 0
    num_unscored: int = 0
    """Scores that are reward failures, among ``num_scores``."""
    num_late: int = 0
    """Batches that somebody else had answered before."""
    scoring_s: float = 0.0
    """Sum of the scores' durations."""
    lifetime_s: float = 0.0
    end_reason: EndReason = "idle"


@dataclass(slots=True)
class _Batch:
    claim: Claim
    renew_at: float
    scores: dict[int, Score] = field(default_factory=dict)
    """By position in the batch."""

    @property
    def is_complete(self) -> bool:
        return len(self.scores) == len(self.claim.requests)


def serve_rewards(
    queue: RewardQueue,
    config: RewardsConfig,
    *,
    owner: str,
    scorer_arguments: Mapping[str, Mapping[str, Any]] | None = None,
    scoring: ScoringBackend | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    should_stop: Callable[[], bool] = lambda: False,
) -> ReplicaReport:
    """Serve one run's queue until there is a reason to end; then finish what is held (or give it back, when stopped).

    ``owner`` is this replica's name, used once. ``scorer_arguments`` by task family. ``scoring`` defaults to
    ``config.scorer_processes`` processes. Raises RewardFailure when scorer processes cannot be started; whatever is
    raised, claimed batches go to another replica when their lease expires.
    """
    backend = scoring or ScorerPool(config.scorer_processes, config.scorer_start_timeout_s)
    with contextlib.closing(backend):
        return _Replica(queue, config, owner, scorer_arguments or {}, backend, clock, sleep, should_stop).serve()


class _Replica:
    def __init__(
        self,
        queue: RewardQueue,
        config: RewardsConfig,
        owner: str,
        scorer_arguments: Mapping[str, Mapping[str, Any]],
        scoring: ScoringBackend,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.queue = queue
        self.config = config
        self.report = ReplicaReport(owner)
        self.scorer_arguments = scorer_arguments
        self.scoring = scoring
        self.clock = clock
        self.sleep = sleep
        self.should_stop = should_stop
        self.started_at = self.worked_at = clock()
        self.held: dict[str, _Batch] = {}
        self.pause_s = config.busy_poll_s
        self.beacon = Beacon(queue.store, f"{REPLICAS}/{owner}.json")
        self.run_watch = Watch(queue.store, RUN_HEARTBEAT, clock)
        self.beat_at = self.started_at

    def serve(self) -> ReplicaReport:
        try:
            while (reason := self._reason_to_end()) is None:
                self._beat()
                self._claim()
                self._work_or_pause()
            if reason == "max_lifetime":
                self._finish_held()
        finally:
            # Also when interrupted: what is given back now need not wait for the end of its lease.
            with contextlib.suppress(OSError):
                self._give_back()
        self.report.end_reason = reason
        self.report.lifetime_s = self.clock() - self.started_at
        self.beacon.beat(ended=True, report=asdict(self.report))
        logger.info("reward replica ended: %s", self.report)
        return self.report

    def _reason_to_end(self) -> EndReason | None:
        now = self.clock()
        if self.should_stop():
            return "stopped"
        if now - self.started_at >= self.config.max_lifetime_s:
            return "max_lifetime"
        if now >= self.beat_at:
            silent_s = self.run_watch.silent_s()
            if self.run_watch.ended:
                return "run_ended"
            if silent_s >= self.config.owner_timeout_s:
                return "run_silent"
        if not self.held and now - self.worked_at >= self.config.keep_alive_s:
            return "idle"
        return None

    def _beat(self) -> None:
        if self.clock() >= self.beat_at:
            self.beacon.beat(num_scores=self.report.num_scores)
            self.beat_at = self.clock() + self.config.heartbeat_s

    def _claim(self) -> None:
        """Hold as much as keeps every process busy, and no more: the rest is for other replicas."""
        while self.scoring.num_waiting() < self.scoring.num_processes:
            claim = self.queue.claim(self.report.owner, self.config.lease_s)
            if claim is None:
                return
            self.held[claim.request_id] = _Batch(claim, self._next_renewal())
            for position, request in enumerate(claim.requests):
                arguments = self.scorer_arguments.get(request.family, {})
                self.scoring.submit((claim.request_id, position), request, arguments)

    def _work_or_pause(self) -> None:
        if self.held:
            self._collect(LOOK_S)
            self.pause_s = self.config.busy_poll_s
            return
        self.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, self.config.idle_poll_s)

    def _collect(self, timeout_s: float) -> None:
        """Take scores that are ready, answer the batches that they complete, renew the leases of the others."""
        for (request_id, position), score in self.scoring.wait(timeout_s):
            batch = self.held[request_id]
            batch.scores[position] = score
            self.report.num_scores += 1
            self.report.num_unscored += score.failure is not None
            self.report.scoring_s += score.duration_s
            if score.failure is not None:
                logger.warning("%s is unscored: %s", score.trajectory_id, score.failure_message)
            if batch.is_complete:
                del self.held[request_id]
                answered = self.queue.complete(batch.claim, [batch.scores[i] for i in range(len(batch.scores))])
                self.report.num_batches += 1
                self.report.num_late += not answered
        now = self.worked_at = self.clock()
        for batch in self.held.values():
            if now >= batch.renew_at:
                batch.claim = self.queue.renew(batch.claim, self.config.lease_s)
                batch.renew_at = self._next_renewal()

    def _finish_held(self) -> None:
        """Every request has a deadline, so this ends."""
        while self.held:
            self._beat()
            self._collect(LOOK_S)

    def _give_back(self) -> None:
        for batch in self.held.values():
            self.queue.release(batch.claim)

    def _next_renewal(self) -> float:
        return self.clock() + self.config.lease_s / 3
