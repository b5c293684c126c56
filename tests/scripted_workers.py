"""Group queues, and rollout workers written by hand that play what they are told."""

from __future__ import annotations

import asyncio
import dataclasses

from resources.environments.family import FamilyConfig
from resources.failures import FailureClass
from resources.rollout.config import RolloutConfig
from resources.rollout.group_queue import GroupQueue
from resources.rollout.messages import Assignment, TrajectoryDone, WorkerReport
from resources.trajectories.trajectory import TrajectoryRef


class ManualClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def families(**changes) -> dict[str, FamilyConfig]:
    common = dict(environment="e", hardware_class="compute", groups_per_iteration=1, group_size=2)
    return {"inline": FamilyConfig(**{**common, **changes})}


def pool_families() -> dict[str, FamilyConfig]:
    return {"pool": families(scorer="exact_answer", score_deadline_s=5.0)["inline"]}


def make_queue(of=None, *, scores=None, clock=None, state=None, seed=7, **config) -> GroupQueue:
    config = {"reward_poll_s": 0.005, "score_grace_s": 1.0, "retry_backoff_s": 0.0, **config}
    if config.get("max_staleness") == 0:
        config["pipeline"] = "synchronous"
    reader = None if scores is None else (lambda: [scores.pop() for _ in range(len(scores))])
    extra = {} if clock is None else {"clock": clock}
    return GroupQueue(
        "run", "file:///nowhere", of or families(), RolloutConfig(**config), seed, state, reward_results=reader, **extra
    )


def played(assignment: Assignment, reward: float | None = None, **changes) -> TrajectoryDone:
    reward = float(assignment.member) if reward is None else reward
    awaits = changes.pop("awaits_score", False)
    fields = dict(
        trajectory_id=assignment.trajectory_id, family=assignment.family, group_id=assignment.group_id,
        member=assignment.member, attempt=assignment.attempt, ref=TrajectoryRef("trajectories/w-000001.arrow", 3),
        reward=None if awaits else reward, awaits_score=awaits, success=reward > 0, failure=None, failure_message="",
        termination="terminated", oldest_version=0, newest_version=0, num_sampled_tokens=5, num_tokens=9, num_turns=2,
        num_invalid_actions=0, truncated=False, duration_s=0.1,
    )  # fmt: skip
    return TrajectoryDone(**{**fields, **changes})


def broken(assignment: Assignment) -> TrajectoryDone:
    return played(
        assignment, awaits_score=True, ref=None, failure=FailureClass.ENVIRONMENT, failure_message="lake is dry"
    )


class ScriptedWorker:
    """Plays what it is given at once, as ``play`` says; a play of None never ends."""

    def __init__(self, queue: GroupQueue, worker_id: str = "w0", capacity: int = 100, play=played):
        self.queue, self.worker_id, self.capacity, self.play = queue, worker_id, capacity, play
        self.seen: list[Assignment] = []
        self.cancelled: list[tuple[str, str]] = []
        self._done: list[TrajectoryDone] = []
        self._first = True

    async def step(self, wait_s: float = 0.0):
        done, self._done = tuple(self._done), []
        held, self._first = (() if self._first else None), False
        await asyncio.sleep(0)
        orders = await self.queue.exchange(WorkerReport(self.worker_id, self.capacity, done, held=held), wait_s)
        self.seen += orders.assignments
        self.cancelled += orders.cancels
        self._first = orders.resync
        for assignment in orders.assignments:
            result = self.play(assignment)
            if result is not None:
                self._done.append(dataclasses.replace(result, **self.versions(result)))
        return orders

    def versions(self, result: TrajectoryDone) -> dict[str, int]:
        version = self.queue._gate.version
        return {"oldest_version": version, "newest_version": version}

    async def run(self):
        while not (await self.step(wait_s=0.05)).closing:
            pass


def run_with_worker(queue: GroupQueue, driver, **worker):
    """Run a driver coroutine beside a scripted worker; returns the worker and what the driver returned."""

    async def main():
        player = ScriptedWorker(queue, **worker)
        playing = asyncio.create_task(player.run())
        try:
            return player, await driver(queue)
        finally:
            await queue.close()
            await asyncio.wait_for(playing, 5)

    return asyncio.run(main())


async def three_batches(queue: GroupQueue):
    batches = []
    for version in range(3):
        batches.append(await queue.collect(version, 5.0))
        await queue.version_loaded(version + 1)
    return batches


async def _load(queue: GroupQueue, version: int) -> None:
    await queue.version_loaded(version)
