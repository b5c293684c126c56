"""The group queue: an actor that hands out trajectories, hears how they ended, and gives the learner its batches.

It joins the staleness gate (what may start, what may be trained), the dispatcher (who plays it) and the evaluation
lane, and holds references only: a few hundred bytes a trajectory. Here are the waits; when the learner's are given up
is in learner_wait.py, what follows from a report, a score or a loss in queue_events.py.

| who waits         | for what                            | until, at the latest                                   |
|-------------------|-------------------------------------|--------------------------------------------------------|
| a rollout worker  | orders                              | the stay that it asked for                             |
| the learner       | its batch                           | the stage's timeout; `stall_limit_s` without a score   |
| a streamed update | further groups of its batch         | the seconds that it asked for                          |
| a load            | what its pipeline samples before it | the stage's timeout; `stall_limit_s` without a score   |
| an evaluation     | its episodes                        | the stage's timeout                                    |

Every method is a coroutine on the event loop of the worker that hosts the actor; the one thing that blocks, looking for
reward results, runs in a thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from resources.environments.family import FamilyConfig
from resources.environments.seeds import episode_seed, prompt_order, sampling_seed
from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.rewards.base import Score
from resources.rollout.config import RolloutConfig
from resources.rollout.dispatch import Dispatcher
from resources.rollout.evaluation_lane import EvaluationLane
from resources.rollout.gate_events import BatchRequested, Opened, VersionLoaded
from resources.rollout.learner_wait import LearnerWait
from resources.rollout.lost_groups import error_of
from resources.rollout.messages import Batch, BatchGroup, Orders, Reserved, WorkerReport
from resources.rollout.queue_events import QueueEvents
from resources.rollout.reward_results import ResultReader, open_reward_results
from resources.rollout.staleness import StalenessGate


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
        lane = EvaluationLane(
            run_id,
            secrets.token_hex(3),
            max_retries=config.max_member_retries,
            episode_seed=lambda of, family, index: episode_seed(of, family, index, "eval"),
            sampling_seed=lambda of, name, attempt: sampling_seed(of, name, 0, 0 if config.deterministic else attempt),
        )
        self._changed = asyncio.Event()
        self._worker_wakes: dict[str, asyncio.Event] = {}
        self._events = QueueEvents(
            run_id,
            self._families,
            config,
            seed,
            gate=self._gate,
            dispatcher=self._dispatcher,
            lane=lane,
            clock=clock,
            on_change=self._wake_all,
        )
        needs_pool = any(family.scorer != "environment" for family in self._families.values())
        self._reader = ResultReader(
            reward_results or (open_reward_results(store_url, run_id) if needs_pool else list), self._events.log
        )
        self._failure: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._events.apply(Opened())

    # -- rollout workers ---------------------------------------------------------------------------------------------

    async def exchange(self, report: WorkerReport, wait_s: float = 0.0) -> Orders:
        """Take a worker's report; answer with its orders: at once when there are any, else within ``wait_s``."""
        self._ensure_running()
        if report.worker_id not in self._dispatcher.workers and report.held is None:
            return Orders(resync=True)  # it was taken for lost; its results since then are not waited for
        self._events.report(report)
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
        self._events.lose_worker(worker_id, reason)

    async def worker_blocked(self, worker_id: str, trajectory_id: str, message: str) -> None:
        """The event loop of a rollout worker stands still; ``trajectory_id``: whose environment does it, if any does.

        That one has failed by its environment's doing. The others of the worker go on when it does, or are played again
        when it is taken for lost.
        """
        self._events.worker_blocked(worker_id, trajectory_id, message)

    async def fail(self, reason: str) -> None:
        """A supervisor knows that no batch can come any more: waits for batches and evaluations end with the reason."""
        self._failure = reason
        self._wake_all()

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
        wait = self._begin_wait()
        while True:
            batch = self._events.last_batch
            if batch is not None and batch.version == version:
                return batch
            changed = self._changed
            self._events.apply(BatchRequested(version))
            batch = self._events.last_batch
            if batch is not None and batch.version == version:
                return batch
            self._check_usable()
            await _happens(changed, wait.check_batch(version, collect_timeout_s))

    async def reserved(self, version: int, known: Collection[str], wait_s: float) -> Reserved:
        """Groups of batch ``version`` that are not ``known`` (their ids), as soon as there are any, else after
        ``wait_s`` seconds. What is given here will be in the batch that `collect` gives; nothing is taken.

        Raises InfrastructureFailure when no batch can come any more.
        """
        self._ensure_running()
        deadline = self._clock() + wait_s
        while True:
            changed = self._changed
            batch = self._events.last_batch
            is_all = self._gate.next_batch > version
            taken = batch.groups if is_all and batch is not None and batch.version == version else ()
            groups = taken or self._gate.reserved(version)
            new = tuple(group for group in groups if group.group_id not in known)
            remaining = deadline - self._clock()
            if new or is_all or remaining <= 0:
                return Reserved(new, is_all)
            self._check_usable()
            await _happens(changed, remaining)

    async def wait_loadable(self, version: int, load_timeout_s: float) -> float:
        """Return when the pipeline lets the engines switch to ``version``; seconds waited.

        That is at once, except in a pipeline with a `LogicalSchedule`, where all that is still to be sampled under the
        version before has to be complete. Raises DeadlineExceeded, naming what is missing, after ``load_timeout_s``
        seconds or when nothing was scored for ``stall_limit_s``; SignalLost as `collect`.
        """
        self._ensure_running()
        wait = self._begin_wait()
        while not self._gate.admission.may_load(version):
            changed = self._changed
            self._check_usable()
            await _happens(changed, wait.check_load(version, load_timeout_s))
        return wait.waited_s

    async def version_loaded(self, version: int) -> None:
        """Every engine serves ``version``: groups beyond the bound are evicted, new ones start."""
        self._ensure_running()
        self._events.apply(VersionLoaded(version))

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
        evaluation = self._events.open_evaluation(episodes, seed, greedy)
        start = self._clock()
        try:
            while evaluation.missing():
                self._check_usable()
                waited = self._clock() - start
                if waited >= evaluate_timeout_s:
                    missing = self._events.missing_episodes(evaluation)
                    raise DeadlineExceeded(f"the evaluation is not complete after {waited:.0f} s: {missing}")
                await _happens(self._changed, min(evaluate_timeout_s - waited, 1.0))
        finally:
            self._events.abandon(evaluation)
        return evaluation.results()

    async def serving_version(self) -> int:
        """The version that engines serve: what one that is built now must load."""
        return self._gate.version

    async def stats(self) -> dict[str, Any]:
        """JSON-able figures; ``log_records`` holds what is new since the last call."""
        return {**self._events.stats(), "log_records": await self.take_log()}

    async def take_log(self) -> list[str]:
        """Lines for people since the last call."""
        return self._events.take_log()

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

    def tick(self) -> None:
        """What time alone brings; called periodically by the queue itself."""
        self._events.tick()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._closing:
            raise InfrastructureFailure(f"the group queue of {self.run_id} was closed")
        if self._failure is not None:
            raise InfrastructureFailure(self._failure)
        if self._events.too_many_lost is not None:
            raise error_of(self._events.too_many_lost, self._config, self._events.last_failures)
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise InfrastructureFailure(f"the group queue of {self.run_id} broke down") from task.exception()

    def _begin_wait(self) -> LearnerWait:
        return LearnerWait(self._config, self._gate, self._dispatcher, self._events, self._clock)

    def _wake_all(self, only_workers: bool = False) -> None:
        if not only_workers:
            self._changed.set()
            self._changed = asyncio.Event()
        for wake in self._worker_wakes.values():
            wake.set()

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
            if len(self._events.scores):
                for score in await self._reader.read():
                    self._events.score(score)


async def _happens(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event, at most so long; whether it happened."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    except TimeoutError:
        return False
    return True
