"""The loop of one rollout worker: takes orders from the group queue, plays them, reports how they ended.

| who waits    | for what                            | until, at the latest                          |
|--------------|-------------------------------------|-----------------------------------------------|
| the loop     | orders of the group queue           | ``exchange_wait_s``, then it asks again       |
| the loop     | a queue that cannot be reached      | ``queue_gone_limit_s``, then it ends          |
| a trajectory | see `env_manager`                   |                                               |
| a played one | its row's file, its scoring request | the writer's and the reward queue's deadlines |

One long poll is out at the queue; what ends meanwhile is reported beside it, a window's worth at a time. A worker that
is worn out *drains*: it takes no more orders, hands back what it plays, reports what is finished, and waits to be
replaced.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from resources.environments.family import FamilyConfig
from resources.environments.threads import DaemonThreads
from resources.failures import InfrastructureFailure
from resources.rollout.config import RolloutConfig
from resources.rollout.engine_link import Call
from resources.rollout.env_manager import EnvManager
from resources.rollout.episode_services import EpisodeServices
from resources.rollout.handover import Handover, never_played
from resources.rollout.messages import Assignment, Orders, TrajectoryDone, Wait, WorkerReport
from resources.trajectories.trajectory import Termination

LONG_WAIT_S = 5.0
"""Waits longer than this are reported, so that a message can name what a batch waits for."""
NUM_REPORTED_WAITS = 64
NUM_LOG_LINES = 100
LONGEST_PAUSE_S = 2.0
DRAIN_S = 15.0
"""A worker that drains is ready to be replaced after this time, whatever it still holds, in seconds."""


class WorkerLoop:
    """Lives on one event loop."""

    def __init__(
        self,
        worker_id: str,
        queue: Any,
        families: Mapping[str, FamilyConfig],
        config: RolloutConfig,
        handover: Handover,
        *,
        call: Call,
        threads: DaemonThreads | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            threads: where blocking environments run; too many abandoned calls there wear the worker out.
        """
        self._threads = threads
        self._worker_id, self._queue, self._families, self._config = worker_id, queue, dict(families), config
        self._handover, self._call, self._clock = handover, call, clock
        self._services: EpisodeServices | None = None
        self._managers: dict[str, EnvManager] = {}
        """Everything assigned whose end the queue has not acknowledged."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._done: list[TrajectoryDone] = []
        self._sampled: list[tuple[str, int]] = []
        self._lines: deque[str] = deque(maxlen=NUM_LOG_LINES)
        self._must_resync = True
        self._polling = False
        self._report_soon: asyncio.TimerHandle | None = None
        self._sends: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._closing = False
        self._draining_since: float | None = None
        self._drain_reason = ""
        self._task: asyncio.Task[Any] | None = None

    @property
    def worn_out(self) -> str:
        """Why the worker's process can be replaced now; empty when it cannot, or need not."""
        if self._draining_since is None:
            return ""
        is_empty = not (self._managers or self._tasks or self._done)
        return self._drain_reason if is_empty or self._clock() - self._draining_since >= DRAIN_S else ""

    def log(self, line: str) -> None:
        """A line for people; it travels to the group queue with the next report."""
        self._lines.append(line)

    def note_first_sampled(self, trajectory_id: str, version: int) -> None:
        self._sampled.append((trajectory_id, version))

    async def run(self, services: EpisodeServices) -> None:
        """Until the queue says that the run is over, `stop`, or a queue that cannot be reached for too long; then
        everything that is played is cancelled. Raises InfrastructureFailure in the last case."""
        self._services = services
        self._task = asyncio.current_task()
        try:
            await self._take_orders()
        except asyncio.CancelledError:
            if not self._closing or self._task is None:
                raise
            self._task.uncancel()
        finally:
            await self._stop_playing()

    def stop(self) -> None:
        """Let `run` return."""
        if not self._closing:
            self._closing = True
            if self._task is not None:
                self._task.cancel()

    async def _take_orders(self) -> None:
        pause_s, answered_at = 0.1, self._clock()
        while not self._closing:
            self._drain_when_worn_out()
            if self._must_resync and self._sends:
                await asyncio.wait(self._sends)  # what they bring belongs into the list of what is held
            self._polling = True
            ok = await self._exchange(self._config.exchange_wait_s)
            self._polling = False
            if ok:
                pause_s, answered_at = 0.1, self._clock()
            elif self._clock() - answered_at >= self._config.queue_gone_limit_s:
                # Its run has ended without a word: nobody will ever ask for what is played here.
                self._closing = True
                raise InfrastructureFailure(
                    f"rollout worker {self._worker_id}: the group queue could not be reached for "
                    f"{self._config.queue_gone_limit_s:g} s (rollout.queue_gone_limit_s)"
                )
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def stats(self) -> dict[str, Any]:
        return {
            "running": len(self._tasks),
            "held": len(self._managers),
            "stages": dict(Counter(manager.stage for manager in self._managers.values())),
            "counts": dict(self._counts),
            "abandoned_calls": self._threads.num_abandoned if self._threads is not None else 0,
            "abandoned_calls_total": self._threads.num_ever_abandoned if self._threads is not None else 0,
            "draining": self._drain_reason,
        }

    def _drain_when_worn_out(self) -> None:
        if self._threads is None or self._draining_since is not None:
            return
        number, limit = self._threads.num_abandoned, self._config.max_abandoned_calls
        if number > limit:
            self._drain(
                f"{number} environment calls were abandoned and hold a thread each, more than "
                f"rollout.max_abandoned_calls ({limit})"
            )

    def _drain(self, reason: str) -> None:
        self._draining_since, self._drain_reason = self._clock(), reason
        self.log(f"{reason}; it hands back {len(self._tasks)} trajectories and is to be replaced")
        for trajectory_id in self._tasks:
            self._hand_back(self._managers[trajectory_id])

    def _hand_back(self, manager: EnvManager) -> None:
        manager.hand_back(f"handed back by rollout worker {self._worker_id}: {self._drain_reason}")

    # -- the queue ---------------------------------------------------------------------------------------------------

    async def _exchange(self, wait_s: float) -> bool:
        report = self._report()
        limit_s = wait_s + self._config.exchange_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                orders: Orders = await self._call(self._queue, "exchange", report, wait_s)
        except Exception as error:  # noqa: BLE001 - whatever it was, what was reported is reported again
            message = f"no answer within {limit_s:g} s" if isinstance(error, TimeoutError) else repr(error)
            self._lines.extendleft(reversed(report.log))
            self.log(f"the group queue could not be reached ({message})")
            self._done[:0] = report.done
            self._sampled[:0] = report.sampled
            self._must_resync = True
            return False
        for done in report.done:
            self._managers.pop(done.trajectory_id, None)
        self._obey(orders)
        return True

    def _report(self) -> WorkerReport:
        done, self._done = tuple(self._done), []
        sampled, self._sampled = tuple(self._sampled), []
        lines = tuple(self._lines)
        self._lines.clear()
        held = None
        # Only the long poll says what is held: a report beside it could cross with orders that are on their way.
        if self._must_resync and self._polling:
            held, self._must_resync = tuple(self._managers), False
        return WorkerReport(
            worker_id=self._worker_id,
            capacity=0 if self._draining_since is not None else self._config.max_concurrent_trajectories,
            done=done,
            sampled=sampled,
            waiting=self._long_waits() if self._polling else (),
            log=lines,
            held=held,
        )

    def _long_waits(self) -> tuple[Wait, ...]:
        now = self._clock()
        longest = heapq.nlargest(
            NUM_REPORTED_WAITS,
            ((now - manager.stage_since, key) for key, manager in self._managers.items()),
        )
        return tuple(
            Wait(key, self._managers[key].waits_for, seconds) for seconds, key in longest if seconds > LONG_WAIT_S
        )

    def _obey(self, orders: Orders) -> None:
        if orders.resync:
            self._must_resync = True
        if orders.closing:
            self._closing = True
            return
        for assignment in orders.assignments:
            self._start(assignment)
        for trajectory_id, termination in orders.cancels:
            manager = self._managers.get(trajectory_id)
            if manager is not None:
                manager.cancel(cast(Termination, termination))

    def _report_done(self, done: TrajectoryDone) -> None:
        self._done.append(done)
        self._counts["done"] += 1
        if done.failure is not None:
            self._counts[f"failed.{done.failure}"] += 1
        if self._report_soon is None and not self._closing:
            loop = asyncio.get_running_loop()
            self._report_soon = loop.call_later(self._config.done_window_s, self._send_beside)

    def _send_beside(self) -> None:
        self._report_soon = None
        if self._done and self._polling and not self._must_resync and not self._closing:
            send = asyncio.get_running_loop().create_task(self._send())
            self._sends.add(send)
            send.add_done_callback(self._sends.discard)

    async def _send(self) -> None:
        await self._exchange(0.0)

    # -- trajectories ------------------------------------------------------------------------------------------------

    def _start(self, assignment: Assignment) -> None:
        trajectory_id = assignment.trajectory_id
        if trajectory_id in self._managers or self._closing:
            return  # ordered twice
        assert self._services is not None
        manager = EnvManager(assignment, self._families[assignment.family], self._services)
        self._managers[trajectory_id] = manager
        playing = asyncio.get_running_loop().create_task(self._play(manager), name=trajectory_id)
        self._tasks[trajectory_id] = playing
        if self._draining_since is not None:  # its orders were on their way
            self._hand_back(manager)

    async def _play(self, manager: EnvManager) -> None:
        assignment, start = manager.assignment, self._clock()
        try:
            trajectory = await manager.play()
            done = await self._handover.deliver(manager, trajectory, self._clock() - start)
        except Exception as error:  # noqa: BLE001 - our own fault; unreported, its group would wait for ever
            self.log(f"{assignment.trajectory_id} broke down: {error!r}")
            done = never_played(assignment, f"the rollout worker broke down on it: {error!r}")
        finally:
            self._tasks.pop(assignment.trajectory_id, None)
        self._report_done(done)

    async def _stop_playing(self) -> None:
        tasks = [*self._tasks.values(), *self._sends]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._services is not None and self._services.closing:
            await asyncio.wait(self._services.closing, timeout=self._config.close_deadline_s)
