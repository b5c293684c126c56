"""The loop of one rollout worker: takes orders from the group queue, plays them, reports how they ended.

| who waits    | for what                            | until, at the latest                          |
|--------------|-------------------------------------|-----------------------------------------------|
| the loop     | orders of the group queue           | ``exchange_wait_s``, then it asks again       |
| a trajectory | see `env_manager`                   |                                               |
| a played one | its row's file, its scoring request | the writer's and the reward queue's deadlines |

One long poll is out at the queue; what ends meanwhile is reported beside it, a window's worth at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from resources.environments.family import FamilyConfig
from resources.rollout.config import RolloutConfig
from resources.rollout.engine_link import Call
from resources.rollout.env_manager import EnvManager, EpisodeServices
from resources.rollout.handover import Handover, never_played
from resources.rollout.messages import Assignment, Orders, Stage, TrajectoryDone, WorkerReport
from resources.trajectories.trajectory import Termination

LONG_WAIT_S = 5.0
"""Waits longer than this are reported, so that a message can name what a batch waits for."""
NUM_REPORTED_WAITS = 8
NUM_LOG_LINES = 100
LONGEST_PAUSE_S = 2.0


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
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
        self._task: asyncio.Task[Any] | None = None

    def log(self, line: str) -> None:
        """A line for people; it travels to the group queue with the next report."""
        self._lines.append(line)

    def note_first_sampled(self, trajectory_id: str, version: int) -> None:
        self._sampled.append((trajectory_id, version))

    async def run(self, services: EpisodeServices) -> None:
        """Until the queue says that the run is over, or `stop`; then everything that is played is cancelled."""
        self._services = services
        self._task = asyncio.current_task()
        try:
            await self._take_orders()
        except asyncio.CancelledError:
            if not self._closing or self._task is None:
                raise
            self._task.uncancel()
        await self._stop_playing()

    def stop(self) -> None:
        """Let `run` return."""
        if not self._closing:
            self._closing = True
            if self._task is not None:
                self._task.cancel()

    async def _take_orders(self) -> None:
        pause_s = 0.1
        while not self._closing:
            if self._must_resync and self._sends:
                await asyncio.wait(self._sends)  # what they bring belongs into the list of what is held
            self._polling = True
            ok = await self._exchange(self._config.exchange_wait_s)
            self._polling = False
            if ok:
                pause_s = 0.1
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def stats(self) -> dict[str, Any]:
        return {
            "running": len(self._tasks),
            "held": len(self._managers),
            "stages": dict(Counter(manager.stage for manager in self._managers.values())),
            "counts": dict(self._counts),
        }

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
            capacity=self._config.max_concurrent_trajectories,
            done=done,
            sampled=sampled,
            waiting=self._long_waits() if self._polling else (),
            log=lines,
            held=held,
        )

    def _long_waits(self) -> tuple[tuple[str, Stage, float], ...]:
        now = self._clock()
        waits: list[tuple[str, Stage, float]] = [
            (key, manager.stage, now - manager.stage_since)
            for key, manager in self._managers.items()
            if now - manager.stage_since > LONG_WAIT_S
        ]
        waits.sort(key=lambda wait: -wait[2])
        return tuple(waits[:NUM_REPORTED_WAITS])

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
        self._tasks[trajectory_id] = asyncio.get_running_loop().create_task(self._play(manager))

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
