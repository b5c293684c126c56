"""What follows from a worker's report, a score, a loss, and the passing of time? The group queue without its waits.

Everything here returns at once: it turns what happened into events of the staleness gate (or of the evaluation lane),
and carries the gate's decisions out, which are assignments and cancels for the dispatcher, and batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from resources.environments.family import FamilyConfig
from resources.environments.seeds import episode_seed, sampling_seed
from resources.failures import FailureClass
from resources.rewards.base import Score
from resources.rollout.awaited_scores import AwaitedScores
from resources.rollout.config import RolloutConfig
from resources.rollout.dispatch import Dispatcher, Lane
from resources.rollout.evaluation_lane import Evaluation, EvaluationLane
from resources.rollout.gate_events import (
    BatchRequested,
    Cancel,
    Event,
    FirstSampled,
    MemberDone,
    ScoreArrived,
    ScoreOverdue,
    Start,
    TakeBatch,
    TooManyLost,
    TrajectoryLost,
)
from resources.rollout.handover import never_played
from resources.rollout.messages import Assignment, Batch, TrajectoryDone, WorkerReport
from resources.rollout.missing_work import describe_missing_batch, describe_missing_episodes
from resources.rollout.queue_stats import queue_stats
from resources.rollout.staleness import StalenessGate

NOT_THE_FAMILYS = (FailureClass.CANCELLED, FailureClass.INFRASTRUCTURE)
"""Failures that say nothing about a family: its circuit breaker does not count them."""
NUM_LOG_RECORDS = 200
"""Lines kept for the log until they are taken."""


class QueueEvents:
    """Lives on the event loop of the group queue."""

    def __init__(
        self,
        run_id: str,
        families: Mapping[str, FamilyConfig],
        config: RolloutConfig,
        seed: int,
        *,
        gate: StalenessGate,
        dispatcher: Dispatcher,
        lane: EvaluationLane,
        clock: Callable[[], float],
        on_change: Callable[[bool], None],
    ) -> None:
        """
        Args:
            on_change: called after everything that may end a wait: of rollout workers for orders (True: only theirs),
                or of the learner for a batch.
        """
        self.last_batch: Batch | None = None
        self.too_many_lost: TooManyLost | None = None
        """The first family that lost more groups than it may."""
        self.last_progress = clock()
        """When something was last played or scored."""
        self.last_failures: dict[str, str] = {}
        """What was last wrong in each family that ever failed."""
        self.scores = AwaitedScores(families, config.score_grace_s)
        self._run_id, self._config, self._seed = run_id, config, seed
        self._gate, self._dispatcher, self._lane = gate, dispatcher, lane
        self._clock, self._on_change = clock, on_change
        self._log_records: deque[str] = deque(maxlen=NUM_LOG_RECORDS)
        for trajectory_id in gate.awaiting_score():
            self.scores.expect(trajectory_id, gate.seats[trajectory_id][0].family, clock())

    # -- the gate ----------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Let the gate decide, and carry its decisions out."""
        # The waits for batches must not wake themselves by asking again, but end when one of them has got its batch.
        only_workers = isinstance(event, BatchRequested)
        events = [event]
        while events:
            event = events.pop()
            if _is_progress(event):
                self.last_progress = self._clock()
            for decision in self._gate.handle(event):
                match decision:
                    case Start():
                        lane: Lane = "retry" if decision.is_retry else "train"
                        self._dispatcher.add(self._assign(decision), lane, self._clock())
                    case Cancel(trajectory_id, termination):
                        if not self._dispatcher.cancel(trajectory_id, termination):
                            events.append(TrajectoryLost(trajectory_id))
                    case TakeBatch(version, groups, counters):
                        self.last_batch = Batch(self._run_id, version, groups, counters)
                        only_workers = False
                    case TooManyLost():
                        self.too_many_lost = self.too_many_lost or decision
        self._on_change(only_workers)

    def _assign(self, start: Start) -> Assignment:
        # A deterministic run plays the same again, whatever had failed.
        attempt = 0 if self._config.deterministic else start.attempt
        return Assignment(
            run_id=self._run_id,
            family=start.family,
            group_id=start.group_id,
            member=start.member,
            attempt=start.attempt,
            group_size=start.group_size,
            seed_env=episode_seed(self._seed, start.family, start.prompt_index, "train"),
            seed_sampling=sampling_seed(self._seed, start.group_id, start.member, attempt),
        )

    # -- rollout workers ---------------------------------------------------------------------------------------------

    def report(self, report: WorkerReport) -> None:
        """A worker tells what is new."""
        is_new = report.worker_id not in self._dispatcher.workers
        record = self._dispatcher.heard(report.worker_id, report.capacity, self._clock())
        record.waiting = {wait.trajectory_id: wait for wait in report.waiting}
        for line in report.log:
            self.log(f"{report.worker_id}: {line}")
        for trajectory_id, version in report.sampled:
            if not self._lane.owns(trajectory_id):
                self.apply(FirstSampled(trajectory_id, version))
        for done in report.done:
            self._take_done(done)
        if report.held is not None:
            held = set(report.held)
            for trajectory_id in self._dispatcher.never_arrived(report.worker_id, held):
                self._lose_trajectory(trajectory_id, "the orders that carried it were lost")
            for trajectory_id in self._dispatcher.unknown_to_us(report.worker_id, held):
                record.cancels.append((trajectory_id, "preempted"))
        if is_new:
            self.log(f"rollout worker {report.worker_id} reports; it plays up to {report.capacity} trajectories")
            self._on_change(False)  # shares change

    def _take_done(self, done: TrajectoryDone) -> None:
        failed = done.failure is not None and not done.failure.is_scored
        if done.trajectory_id in self._gate.seats or self._lane.owns(done.trajectory_id):
            if done.failure not in NOT_THE_FAMILYS:
                failure = done.failure_message if failed else None
                self._dispatcher.note_outcome(done.trajectory_id, done.family, failure, self._clock())
            if failed:
                self.log(f"{done.trajectory_id} failed ({done.failure}): {done.failure_message}")
                self.last_failures[done.family] = done.failure_message
        self._dispatcher.ended(done.trajectory_id)
        if self._lane.owns(done.trajectory_id):
            self._play_episode(self._lane.done(done))
        else:
            self.apply(MemberDone(done))
        early = self.scores.take_early(done.trajectory_id)
        if done.awaits_score and (
            self._lane.awaits_score(done.trajectory_id) or self._gate.awaits_score(done.trajectory_id)
        ):
            self.scores.expect(done.trajectory_id, done.family, self._clock())
            if early is not None:
                self.score(early)

    def worker_blocked(self, worker_id: str, trajectory_id: str, message: str) -> None:
        """The event loop of a worker stands still, by the environment of this trajectory (if any)."""
        self.log(f"rollout worker {worker_id}: {message}")
        record = self._dispatcher.workers.get(worker_id)
        if record is None:
            return
        record.blocked = message
        culprit = record.held.get(trajectory_id)
        if culprit is not None:
            record.cancels.append((trajectory_id, "preempted"))
            self._take_done(never_played(culprit, message, FailureClass.ENVIRONMENT))

    def lose_worker(self, worker_id: str, reason: str) -> None:
        """What it held is played elsewhere."""
        lost = self._dispatcher.remove_worker(worker_id)
        self.log(f"rollout worker {worker_id} is lost ({reason}); {len(lost)} trajectories are played again")
        for trajectory_id in lost:
            self._lose_trajectory(trajectory_id, f"worker {worker_id} was lost: {reason}")

    def _lose_trajectory(self, trajectory_id: str, message: str) -> None:
        self._dispatcher.ended(trajectory_id)
        self.scores.take_early(trajectory_id)
        if self._lane.owns(trajectory_id):
            self._play_episode(self._lane.failed(trajectory_id))
        else:
            self.apply(TrajectoryLost(trajectory_id, message))

    # -- scores and time ---------------------------------------------------------------------------------------------

    def score(self, score: Score) -> None:
        """The reward pool has judged, or says that it cannot."""
        if self._is_played(score.trajectory_id):
            self.scores.keep_early(score)
            return
        awaited = self.scores.settle(score.trajectory_id)
        # A verdict may have a message too (what the tests said): only what has no reward is no verdict.
        if score.reward is None and score.failure_message:
            self.log(f"{score.trajectory_id} was not scored: {score.failure_message}")
            if awaited is not None:
                self.last_failures[awaited.family] = score.failure_message
        if self._lane.awaits_score(score.trajectory_id):
            self._play_episode(self._lane.scored(score))
        else:
            self.apply(ScoreArrived(score))

    def _is_played(self, trajectory_id: str) -> bool:
        """Whether its end was not reported yet, as far as it is waited for. A warm replica may be faster than the
        report of the worker that asked it."""
        if self._lane.owns(trajectory_id):
            return not self._lane.awaits_score(trajectory_id)
        return trajectory_id in self._gate.seats and not self._gate.awaits_score(trajectory_id)

    def tick(self) -> None:
        """What time alone brings: lost workers, overdue scores, retries whose pause is over."""
        now = self._clock()
        for worker_id in self._dispatcher.silent(now):
            blocked = self._dispatcher.workers[worker_id].blocked
            self.lose_worker(worker_id, blocked or f"not heard of for {self._config.worker_timeout_s:g} s")
        for trajectory_id, family in self.scores.take_overdue(now).items():
            message = (
                f"no score of {trajectory_id} came within its deadline and {self._config.score_grace_s:g} s of grace"
            )
            self.log(message)
            self.last_failures[family] = message
            if self._lane.awaits_score(trajectory_id):
                self.score(Score(trajectory_id, "", "", None))
            else:
                self.apply(ScoreOverdue(trajectory_id, message))
        if self._dispatcher.release(now):
            self._on_change(False)

    # -- evaluation episodes -----------------------------------------------------------------------------------------

    def open_evaluation(self, episodes: Mapping[str, int], seed: int, greedy: bool) -> Evaluation:
        evaluation, assignments = self._lane.open(episodes, seed, greedy)
        for assignment in assignments:
            self._dispatcher.add(assignment, "eval", self._clock())
        self._on_change(False)
        return evaluation

    def abandon(self, evaluation: Evaluation) -> None:
        """Stop what is still played of it; no-op for a complete one."""
        for trajectory_id in self._lane.abandon(evaluation):
            self._dispatcher.cancel(trajectory_id, "preempted")
            self.scores.settle(trajectory_id)
            self.scores.take_early(trajectory_id)

    def _play_episode(self, again: Assignment | None) -> None:
        """An episode has ended; ``again``: it failed, and this is its next attempt."""
        if again is not None:
            self._dispatcher.add(again, "eval", self._clock())
        self._on_change(False)

    # -- for people --------------------------------------------------------------------------------------------------

    def missing(self) -> str:
        """What the next batch waits for."""
        return describe_missing_batch(self._gate, self._dispatcher, self.last_failures, self._score_wait)

    def missing_episodes(self, evaluation: Evaluation) -> str:
        return describe_missing_episodes(evaluation, self._dispatcher, self.last_failures, self._score_wait)

    def _score_wait(self, trajectory_id: str) -> str:
        return self.scores.describe(trajectory_id, self._clock())

    def log(self, line: str) -> None:
        self._log_records.append(line)

    def take_log(self) -> list[str]:
        lines = list(self._log_records)
        self._log_records.clear()
        return lines

    def stats(self) -> dict[str, Any]:
        """JSON-able figures."""
        return queue_stats(self._gate, self._dispatcher, len(self.scores), self._clock())


def _is_progress(event: Event) -> bool:
    """Whether something was played or scored. Failures are none: what always fails must not look alive for ever."""
    match event:
        case MemberDone(done):
            return done.failure is None or done.failure.is_scored
        case ScoreArrived(score):
            return score.reward is not None
    return False
