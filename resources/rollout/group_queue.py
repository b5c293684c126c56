"""The group queue: an actor that hands out trajectories, hears how they ended, and gives the learner its batches.

It joins the staleness gate (what may start, what may be trained), the dispatcher (who plays it) and the evaluation
lane, and holds references only: a few hundred bytes a trajectory. Every method is a coroutine on the event loop of
the worker that hosts the actor; the one thing that blocks, looking for reward results, runs in a thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from resources.environments.family import FamilyConfig
from resources.environments.seeds import episode_seed, prompt_order, sampling_seed
from resources.failures import DeadlineExceeded, FailureClass, InfrastructureFailure
from resources.rewards.base import Score
from resources.rollout.config import RolloutConfig
from resources.rollout.dispatch import Dispatcher, Lane
from resources.rollout.evaluation_lane import EvaluationLane
from resources.rollout.gate_events import (
    BatchRequested,
    Cancel,
    Event,
    FirstSampled,
    MemberDone,
    Opened,
    ScoreArrived,
    ScoreOverdue,
    Start,
    TakeBatch,
    TooManyLost,
    TrajectoryLost,
    VersionLoaded,
)
from resources.rollout.handover import never_played
from resources.rollout.lost_groups import error_of
from resources.rollout.messages import Assignment, Batch, BatchGroup, Orders, TrajectoryDone, WorkerReport
from resources.rollout.missing_work import describe_missing_batch, describe_missing_episodes
from resources.rollout.reward_results import ResultReader, open_reward_results
from resources.rollout.staleness import StalenessGate

NOT_THE_FAMILYS = (FailureClass.CANCELLED, FailureClass.INFRASTRUCTURE)
"""Failures that say nothing about a family: its circuit breaker does not count them."""
NUM_LOG_RECORDS = 200
"""Lines kept for the log until `stats` drains them."""


class GroupQueue:
    """See the module. All waits end at their deadline with a message that names what is missing."""

    def __init__(
        self,
        run_id: str,
        store_url: str,
        families: Mapping[str, FamilyConfig],
        config: RolloutConfig,
        seed: int,
        state: Mapping[str, Any] | None = None,
        *,
        num_batches: int | None = None,
        reward_results: Callable[[], list[Score]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            state: of an earlier `snapshot`, to go on from; or ``{"version": n}``: nothing is known but the version.
            num_batches: batches that will ever be taken, those before a resume included; None: no end is known.
            reward_results: called in a thread; the scores that are new since the last call. Default: the run's reward
                queue at ``store_url``.
            clock: monotonic seconds.
        """
        self.run_id = run_id
        self._families = dict(families)
        self._config = config
        self._seed = seed
        self._clock = clock
        self._gate = StalenessGate(
            run_id,
            self._families,
            config,
            seed_env=lambda family, index: episode_seed(seed, family, index, "train"),
            prompt_order=lambda family, epoch, num_prompts: prompt_order(seed, family, epoch, num_prompts),
            num_batches=num_batches,
        )
        if state is not None:
            self._gate.restore(state)
        self._dispatcher = Dispatcher(
            worker_timeout_s=config.worker_timeout_s,
            retry_backoff_s=config.retry_backoff_s,
            breaker_failures=config.breaker_failures,
        )
        self._lane = EvaluationLane(
            run_id,
            secrets.token_hex(3),
            max_retries=config.max_member_retries,
            episode_seed=lambda of, family, index: episode_seed(of, family, index, "eval"),
            sampling_seed=lambda of, name, attempt: sampling_seed(of, name, 0, self._seeded(attempt)),
        )
        needs_pool = any(family.scorer != "environment" for family in self._families.values())
        self._reader = ResultReader(
            reward_results or (open_reward_results(store_url, run_id) if needs_pool else list), self._log
        )
        self._score_due: dict[str, tuple[float, str]] = {}
        """When the score of each trajectory that awaits one is overdue, and the trajectory's family."""
        for trajectory_id in self._gate.awaiting_score():
            self._expect_score(trajectory_id, self._gate.seats[trajectory_id][0].family)
        self._last_batch: Batch | None = None
        self._failure: str | None = None
        self._too_many_lost: TooManyLost | None = None
        self._last_progress = clock()
        self._last_failures: dict[str, str] = {}
        """What was last wrong in each family that ever failed."""
        self._changed = asyncio.Event()
        self._worker_wakes: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._log_records: deque[str] = deque(maxlen=NUM_LOG_RECORDS)
        self._apply(Opened())

    # -- rollout workers ---------------------------------------------------------------------------------------------

    async def exchange(self, report: WorkerReport, wait_s: float = 0.0) -> Orders:
        """Take a worker's report; answer with its orders: at once when there are any, else within ``wait_s``."""
        self._ensure_running()
        known = report.worker_id in self._dispatcher.workers
        if not known and report.held is None:
            return Orders(resync=True)  # it was taken for lost; its results since then are not waited for
        self._take_report(report)
        if not known:
            self._log(f"rollout worker {report.worker_id} reports; it plays up to {report.capacity} trajectories")
            self._wake_all()  # shares change
        deadline = self._clock() + wait_s
        wake = self._worker_wakes.setdefault(report.worker_id, asyncio.Event())
        while not self._closing:
            wake.clear()
            if report.worker_id in self._dispatcher.workers:  # else: declared lost while it waited here
                assignments, cancels = self._dispatcher.take(report.worker_id, self._clock())
                if assignments or cancels:
                    return Orders(tuple(assignments), tuple(cancels))
            remaining = deadline - self._clock()
            if remaining <= 0 or (not await _happens(wake, remaining) and self._clock() >= deadline):
                return Orders()
        return Orders(closing=True)

    async def worker_lost(self, worker_id: str, reason: str = "its process has ended") -> None:
        """A supervisor knows that a rollout worker is gone: play its trajectories elsewhere."""
        self._lose_worker(worker_id, reason)

    async def worker_blocked(self, worker_id: str, trajectory_id: str, message: str) -> None:
        """The event loop of a rollout worker stands still; ``trajectory_id``: whose environment does it, if any does.

        That one has failed by its environment's doing. The others of the worker go on when it does, or are played again
        when it is taken for lost.
        """
        self._log(f"rollout worker {worker_id}: {message}")
        record = self._dispatcher.workers.get(worker_id)
        if record is None:
            return
        record.blocked = message
        culprit = record.held.get(trajectory_id)
        if culprit is not None:
            record.cancels.append((trajectory_id, "preempted"))
            self._take_done(never_played(culprit, message, FailureClass.ENVIRONMENT))

    async def fail(self, reason: str) -> None:
        """A supervisor knows that no batch can come any more: waits for batches and evaluations end with the reason."""
        self._failure = reason
        self._wake_all()

    def _take_report(self, report: WorkerReport) -> None:
        record = self._dispatcher.heard(report.worker_id, report.capacity, self._clock())
        record.waiting = {wait.trajectory_id: wait for wait in report.waiting}
        for line in report.log:
            self._log(f"{report.worker_id}: {line}")
        for trajectory_id, version in report.sampled:
            if not self._lane.owns(trajectory_id):
                self._apply(FirstSampled(trajectory_id, version))
        for done in report.done:
            self._take_done(done)
        if report.held is not None:
            held = set(report.held)
            for trajectory_id in self._dispatcher.never_arrived(report.worker_id, held):
                self._lose_trajectory(trajectory_id, "the orders that carried it were lost")
            for trajectory_id in self._dispatcher.unknown_to_us(report.worker_id, held):
                record.cancels.append((trajectory_id, "preempted"))

    def _take_done(self, done: TrajectoryDone) -> None:
        failed = done.failure is not None and not done.failure.is_scored
        if done.trajectory_id in self._gate.seats or self._lane.owns(done.trajectory_id):
            if done.failure not in NOT_THE_FAMILYS:
                failure = done.failure_message if failed else None
                self._dispatcher.note_outcome(done.trajectory_id, done.family, failure, self._clock())
            if failed:
                self._log(f"{done.trajectory_id} failed ({done.failure}): {done.failure_message}")
                self._last_failures[done.family] = done.failure_message
        self._dispatcher.ended(done.trajectory_id)
        if self._lane.owns(done.trajectory_id):
            self._add_again(self._lane.done(done))
            self._wake_all()
        else:
            self._apply(MemberDone(done))
        if done.awaits_score and self._awaits_score(done.trajectory_id):
            self._expect_score(done.trajectory_id, done.family)

    # -- the learner's side ------------------------------------------------------------------------------------------

    async def collect(self, version: int, collect_timeout_s: float) -> Batch:
        """Batch ``version``, as soon as it is complete; asked again, the same batch again.

        Raises:
            DeadlineExceeded: after ``collect_timeout_s`` seconds, or when nothing was scored for ``stall_limit_s``;
                names the families, groups, members and stages that are missing.
            SignalLost, GroupsFail, GroupsStale: a family lost more groups, of that cause, than its limit allows.
            ValueError: the version is not that of the next batch.
        """
        self._ensure_running()
        start = self._clock()
        stalled = False
        while True:
            if self._last_batch is not None and self._last_batch.version == version:
                return self._last_batch
            changed = self._changed
            self._apply(BatchRequested(version))
            if self._last_batch is not None and self._last_batch.version == version:
                return self._last_batch
            self._check_usable()
            now = self._clock()
            self._check_hope(version, now)
            quiet = now - max(start, self._last_progress)
            if now - start >= collect_timeout_s:
                raise DeadlineExceeded(f"batch {version} is not complete after {now - start:.0f} s: {self._missing()}")
            if quiet >= self._config.stall_limit_s:
                raise DeadlineExceeded(f"batch {version}: nothing was scored for {quiet:.0f} s: {self._missing()}")
            if quiet >= self._config.stall_after_s and not stalled:
                self._log(f"batch {version}: nothing was scored for {quiet:.0f} s: {self._missing()}")
            stalled = quiet >= self._config.stall_after_s
            await _happens(changed, min(start + collect_timeout_s - now, self._config.stall_after_s, 1.0))

    async def wait_loadable(self, version: int, load_timeout_s: float) -> float:
        """Return when the pipeline lets the engines switch to ``version``; seconds waited.

        That is at once, except in a pipeline with a `LogicalSchedule`, where all that is still to be sampled under the
        version before has to be complete. Raises DeadlineExceeded, naming what is missing, after ``load_timeout_s``
        seconds or when nothing was scored for ``stall_limit_s``; SignalLost as `collect`.
        """
        self._ensure_running()
        start = self._clock()
        while not self._gate.may_load(version):
            changed = self._changed
            self._check_usable()
            now = self._clock()
            quiet = now - max(start, self._last_progress)
            if now - start >= load_timeout_s or quiet >= self._config.stall_limit_s:
                raise DeadlineExceeded(
                    f"version {version} waits for its load since {now - start:.0f} s, and nothing was scored for "
                    f"{quiet:.0f} s: {self._missing()}"
                )
            await _happens(changed, min(start + load_timeout_s - now, 1.0))
        return self._clock() - start

    async def version_loaded(self, version: int) -> None:
        """Every engine serves ``version``: groups beyond the bound are evicted, new ones start."""
        self._ensure_running()
        self._apply(VersionLoaded(version))

    async def evaluate(
        self, episodes: Mapping[str, int], seed: int, evaluate_timeout_s: float, greedy: bool = False
    ) -> list[BatchGroup]:
        """Play held-out episodes (number by family), before training's; groups of one, in order, with their scores.

        Raises ValueError for an unknown family, DeadlineExceeded naming the episodes that are missing.
        """
        self._ensure_running()
        unknown = sorted(set(episodes) - set(self._families))
        if unknown:
            raise ValueError(f"episodes names the families {unknown}; this run has {sorted(self._families)}")
        evaluation, assignments = self._lane.open(episodes, seed, greedy)
        for assignment in assignments:
            self._dispatcher.add(assignment, "eval", self._clock())
        self._wake_all()
        start = self._clock()
        try:
            while evaluation.missing():
                self._check_usable()
                waited = self._clock() - start
                if waited >= evaluate_timeout_s:
                    missing = describe_missing_episodes(
                        evaluation, self._dispatcher, self._last_failures, self._score_wait
                    )
                    raise DeadlineExceeded(f"the evaluation is not complete after {waited:.0f} s: {missing}")
                await _happens(self._changed, min(evaluate_timeout_s - waited, 1.0))
        finally:
            for trajectory_id in self._lane.abandon(evaluation):
                self._dispatcher.cancel(trajectory_id, "preempted")
                self._score_due.pop(trajectory_id, None)
        return evaluation.results()

    async def serving_version(self) -> int:
        """The version that engines serve: what one that is built now must load."""
        return self._gate.version

    async def stats(self) -> dict[str, Any]:
        """JSON-able figures; ``log_records`` holds what is new since the last call."""
        log_records, now = await self.take_log(), self._clock()
        return {
            "version": self._gate.version,
            "next_batch": self._gate.next_batch,
            "num_queued": self._dispatcher.num_queued(),
            "num_awaiting_score": len(self._score_due),
            "num_ignored": self._gate.num_ignored,
            "families": {
                name: {
                    "running": len(family.running),
                    "complete": len(family.complete),
                    "waiting": len(family.waiting),
                    "accepted": self._gate.accepted(name),
                    "cursor": family.cursor,
                    "counts": dict(family.counts),
                }
                for name, family in self._gate.families.items()
            },
            "workers": {
                worker_id: {
                    "held": len(record.held),
                    "capacity": record.capacity,
                    "silent_s": round(now - record.last_heard, 3),
                }
                for worker_id, record in self._dispatcher.workers.items()
            },
            "breakers": {name: breaker.stats() for name, breaker in sorted(self._dispatcher.breakers.items())},
            "log_records": log_records,
        }

    async def take_log(self) -> list[str]:
        """Lines for people since the last call."""
        lines = list(self._log_records)
        self._log_records.clear()
        return lines

    async def snapshot(self) -> dict[str, Any]:
        """JSON-able state for a resume: cursors, open and unconsumed groups, counters."""
        return self._gate.snapshot()

    async def close(self) -> None:
        """End the service: workers are told to end, waits for batches fail. No-op when closed before."""
        self._closing = True
        self._wake_all()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._reader.close()

    # -- scores, losses, deadlines -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """What time alone brings: lost workers, overdue scores, retries whose pause is over."""
        now = self._clock()
        for worker_id in self._dispatcher.silent(now):
            blocked = self._dispatcher.workers[worker_id].blocked
            self._lose_worker(worker_id, blocked or f"not heard of for {self._config.worker_timeout_s:g} s")
        for trajectory_id in [key for key, (due, _) in self._score_due.items() if due <= now]:
            _, family = self._score_due.pop(trajectory_id)
            message = (
                f"no score of {trajectory_id} came within its deadline and {self._config.score_grace_s:g} s of grace"
            )
            self._log(message)
            self._last_failures[family] = message
            if self._lane.awaits_score(trajectory_id):
                self._take_score(Score(trajectory_id, "", "", None))
            else:
                self._apply(ScoreOverdue(trajectory_id, message))
        if self._dispatcher.release(now):
            self._wake_all()

    def _take_score(self, score: Score) -> None:
        due = self._score_due.pop(score.trajectory_id, None)
        # A verdict may have a message too (what the tests said): only what has no reward is no verdict.
        if score.reward is None and score.failure_message:
            self._log(f"{score.trajectory_id} was not scored: {score.failure_message}")
            if due is not None:
                self._last_failures[due[1]] = score.failure_message
        if self._lane.awaits_score(score.trajectory_id):
            self._add_again(self._lane.scored(score))
            self._wake_all()
        else:
            self._apply(ScoreArrived(score))

    def _awaits_score(self, trajectory_id: str) -> bool:
        return self._lane.awaits_score(trajectory_id) or self._gate.awaits_score(trajectory_id)

    def _expect_score(self, trajectory_id: str, family: str) -> None:
        due = self._clock() + self._families[family].score_deadline_s + self._config.score_grace_s
        self._score_due[trajectory_id] = (due, family)

    def _lose_worker(self, worker_id: str, reason: str) -> None:
        lost = self._dispatcher.remove_worker(worker_id)
        self._log(f"rollout worker {worker_id} is lost ({reason}); {len(lost)} trajectories are played again")
        for trajectory_id in lost:
            self._lose_trajectory(trajectory_id, f"worker {worker_id} was lost: {reason}")

    def _lose_trajectory(self, trajectory_id: str, message: str) -> None:
        self._dispatcher.ended(trajectory_id)
        if self._lane.owns(trajectory_id):
            self._add_again(self._lane.failed(trajectory_id))
            self._wake_all()
        else:
            self._apply(TrajectoryLost(trajectory_id, message))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        """Let the gate decide, and carry its decisions out."""
        # The waits for batches must not wake themselves by asking again.
        is_request = isinstance(event, BatchRequested)
        events = [event]
        while events:
            event = events.pop()
            if _is_progress(event):
                self._last_progress = self._clock()
            for decision in self._gate.handle(event):
                match decision:
                    case Start():
                        lane: Lane = "retry" if decision.is_retry else "train"
                        self._dispatcher.add(self._assign(decision), lane, self._clock())
                    case Cancel(trajectory_id, termination):
                        if not self._dispatcher.cancel(trajectory_id, termination):
                            events.append(TrajectoryLost(trajectory_id))
                    case TakeBatch(version, groups, counters):
                        self._last_batch = Batch(self.run_id, version, groups, counters)
                    case TooManyLost():
                        self._too_many_lost = self._too_many_lost or decision
        self._wake_all(only_workers=is_request)

    def _assign(self, start: Start) -> Assignment:
        return Assignment(
            run_id=self.run_id,
            family=start.family,
            group_id=start.group_id,
            member=start.member,
            attempt=start.attempt,
            group_size=start.group_size,
            seed_env=episode_seed(self._seed, start.family, start.prompt_index, "train"),
            seed_sampling=sampling_seed(self._seed, start.group_id, start.member, self._seeded(start.attempt)),
        )

    def _seeded(self, attempt: int) -> int:
        """What an attempt adds to a sampling seed: a deterministic run plays the same again, whatever had failed."""
        return 0 if self._config.deterministic else attempt

    def _add_again(self, assignment: Assignment | None) -> None:
        if assignment is not None:
            self._dispatcher.add(assignment, "eval", self._clock())

    def _missing(self) -> str:
        return describe_missing_batch(self._gate, self._dispatcher, self._last_failures, self._score_wait)

    def _score_wait(self, trajectory_id: str) -> str:
        """What a trajectory whose score is awaited waits for, for people."""
        if trajectory_id not in self._score_due:
            return "waits for its score"
        due, family = self._score_due[trajectory_id]
        since = self._clock() - (due - self._families[family].score_deadline_s - self._config.score_grace_s)
        return f"waits for its score from scorer {self._families[family].scorer!r} since {since:.0f} s"

    def _check_usable(self) -> None:
        if self._closing:
            raise InfrastructureFailure(f"the group queue of {self.run_id} was closed")
        if self._failure is not None:
            raise InfrastructureFailure(self._failure)
        if self._too_many_lost is not None:
            raise error_of(self._too_many_lost, self._config, self._last_failures)
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise InfrastructureFailure(f"the group queue of {self.run_id} broke down") from task.exception()

    def _check_hope(self, version: int, now: float) -> None:
        """An outage is waited out; what never worked is a mistake, and nobody need wait for its stall limit."""
        for name in self._gate.missing():
            breaker = self._dispatcher.breaker(name)
            if breaker.hopeless_for_s(now) >= self._config.never_worked_limit_s:
                raise DeadlineExceeded(
                    f"batch {version}: no trajectory of family {name!r} has ended well since the start, for "
                    f"{breaker.hopeless_for_s(now):.0f} s (rollout.never_worked_limit_s); {breaker.describe(name)}"
                )

    def _wake_all(self, only_workers: bool = False) -> None:
        if not only_workers:
            self._changed.set()
            self._changed = asyncio.Event()
        for wake in self._worker_wakes.values():
            wake.set()

    def _log(self, line: str) -> None:
        self._log_records.append(line)

    def _ensure_running(self) -> None:
        """Start the background loops on first use: an actor is constructed where no event loop runs."""
        if not self._tasks and not self._closing:
            self._tasks = [asyncio.create_task(self._keep_time()), asyncio.create_task(self._read_scores())]

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(self._config.reward_poll_s)
            self.tick()

    async def _read_scores(self) -> None:
        while True:
            await asyncio.sleep(self._config.reward_poll_s)
            if self._score_due:
                for score in await self._reader.read():
                    self._take_score(score)


def _is_progress(event: Event) -> bool:
    """Whether something was played or scored. Failures are none: what always fails must not look alive for ever."""
    match event:
        case MemberDone(done):
            return done.failure is None or done.failure.is_scored
        case ScoreArrived(score):
            return score.reward is not None
    return False


async def _happens(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event, at most so long; whether it happened."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    except TimeoutError:
        return False
    return True
