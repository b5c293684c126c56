"""Deterministic rollouts over hand-written parts: any number of workers, any delays, any failures that are retried."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Literal, get_args

import numpy as np
import pytest

from resources.engines.base import Generation
from resources.environments.family import FamilyConfig
from resources.failures import EnvironmentFailure
from resources.rollout.config import RolloutConfig
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.episode_services import EpisodeServices
from resources.rollout.group_queue import GroupQueue
from resources.rollout.handover import Handover, ScoreSubmitter
from resources.rollout.worker_loop import WorkerLoop
from resources.trajectories.digest import trajectory_digest
from tests.unit.test_resources_rollout_env_manager import STOP, EchoEnvironment, LetterFormat
from tests.unit.test_resources_rollout_worker_loop import MemoryWriter, NamedScorer

NUM_BATCHES = 4


async def delay(rng: random.Random) -> None:
    """Some turns of the event loop: other trajectories overtake."""
    for _ in range(rng.randrange(1, 12)):
        await asyncio.sleep(0)


class SeededGenerator:
    """An engine whose answers depend on (seed, position, version) only, as an invariant one's do."""

    def __init__(self, rng: random.Random):
        self.rng, self.version = rng, 0

    async def generate(self, request, hardware_class):
        await delay(self.rng)
        noise = random.Random(f"{request.seed} {len(request.token_ids)} {self.version}")
        letters = "win" if noise.random() < 0.3 else noise.choice("abcd")
        ids = [*map(ord, letters), STOP]
        return Generation(
            request.request_id, request.trajectory_id, np.array(ids, np.int32),
            np.array([noise.random() for _ in ids], np.float32), np.full(len(ids), self.version, np.int32), "stop",
            hardware_class=hardware_class,
        )  # fmt: skip

    def release(self, trajectory_id): ...


class DelayedEnvironment(EchoEnvironment):
    """Takes its time, and sometimes breaks: for no reason that lies in the episode."""

    max_turns = 4

    def __init__(self, rng: random.Random, failure_share: float):
        super().__init__()
        self.rng, self.failure_share = rng, failure_share

    async def step(self, action):
        await delay(self.rng)
        if self.rng.random() < self.failure_share:
            raise EnvironmentFailure("echo: the connection was lost")
        return await super().step(action)


Resume = Literal["recorded", "collected", "lost"]
"""What a killed driver had done of the iteration behind the recorded one: nothing but play, collected its batch before
the queue's state was saved, or after it."""


def play(num_workers: int, delays: int, failure_share: float = 0.0, resume: Resume | None = None, **config) -> list:
    """Four batches; everything in them that a learner could see, in order. With ``resume`` the driver is killed behind
    every version that was loaded, and another one goes on from the state that was saved."""
    rng = random.Random(delays)
    families = {
        name: FamilyConfig(environment="echo", hardware_class="c", groups_per_iteration=groups, group_size=3)
        for name, groups in (("f", 3), ("g", 2))
    }
    settings = RolloutConfig(
        exchange_wait_s=0.05, retry_backoff_s=0.0, done_window_s=0.0, max_member_retries=30, breaker_failures=10_000,
        max_concurrent_trajectories=4 if num_workers > 1 else 64, **config,
    )  # fmt: skip
    generator = SeededGenerator(rng)
    writers: list[MemoryWriter] = []

    async def call(actor, method, *arguments):
        await delay(rng)
        return await getattr(actor, method)(*arguments)

    def start(queue: GroupQueue, index: int) -> asyncio.Task:
        writers.append(MemoryWriter())
        handover = Handover(
            families, dict.fromkeys(families, NamedScorer()), writers[-1], ScoreSubmitter(lambda r: None, 0)
        )
        loop = WorkerLoop(f"w{index}", queue, families, settings, handover, call=call)
        services = EpisodeServices(
            chat=EncodingCache(LetterFormat()), proxy=generator, context_length=200, length_finish="step",
            make_environment=lambda name, family: DelayedEnvironment(rng, failure_share),
            on_first_sampled=loop.note_first_sampled,
        )  # fmt: skip
        return asyncio.create_task(loop.run(services))

    async def life(versions: range, state: dict | None, found: list) -> dict:
        queue = GroupQueue("run", "", families, settings, 5, state)
        workers = [start(queue, index) for index in range(num_workers)]
        try:
            for version in versions:
                batch = await queue.collect(version, 20.0)
                rows = {row.trajectory_id: row for writer in writers for row in writer.rows}
                for group in batch.groups:
                    members = [(m.reward, trajectory_digest(rows[m.trajectory_id])) for m in group.members]
                    found.append((version, group.group_id, group.seed_env, members))
                await delay(rng)
                await queue.wait_loadable(version + 1, 20.0)
                generator.version = version + 1
                await queue.version_loaded(version + 1)
            for _ in range(rng.randrange(5)):
                await delay(rng)
            if resume == "collected":
                await queue.collect(versions.stop, 20.0)
            state = json.loads(json.dumps(await queue.snapshot()))
            if resume == "lost":
                await queue.collect(versions.stop, 20.0)
            return state
        finally:
            await queue.close()
            await asyncio.gather(*workers)

    async def main() -> list:
        found, state = [], None
        for first in range(0, NUM_BATCHES, 1 if resume else NUM_BATCHES):
            state = await life(range(first, first + 1 if resume else NUM_BATCHES), state, found)
        return found

    return asyncio.run(asyncio.wait_for(main(), 60))


PIPELINES = {
    "synchronous": dict(pipeline="synchronous", max_staleness=0),
    "one_off": dict(pipeline="one_off"),
    "asynchronous, alpha 2": dict(max_staleness=2),
    "dynamic sampling": dict(max_staleness=1, dynamic_sampling=True),
    "batch stepping": dict(max_staleness=1, stepping="batch"),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_workers_delays_and_retried_failures_change_nothing(name: str) -> None:
    config = dict(deterministic=True, **PIPELINES[name])
    expected = play(1, delays=0, **config)
    assert [len(members) for *_, members in expected] == [3] * 5 * NUM_BATCHES
    assert [group_id for _, group_id, *_ in expected] == sorted(
        (group_id for _, group_id, *_ in expected), key=lambda key: (expected_batch(expected, key), key)
    ), "batches in order; in each, families and prompts in theirs"
    for num_workers in (1, 2, 4):
        for failure_share in (0.0, 0.15):
            assert play(num_workers, 10 * num_workers + 1, failure_share, **config) == expected


@pytest.mark.parametrize("resume", get_args(Resume))
@pytest.mark.parametrize("name", PIPELINES)
def test_a_resumed_run_goes_on_as_if_it_had_never_ended(name: str, resume: Resume) -> None:
    """Killed behind every single iteration, with another number of workers each time it is tried."""
    config = dict(deterministic=True, **PIPELINES[name])
    expected = play(1, delays=0, **config)
    for num_workers in (1, 4):
        for failure_share in (0.0, 0.15):
            assert play(num_workers, 7 * num_workers + 2, failure_share, resume, **config) == expected


def expected_batch(found: list, group_id: str) -> int:
    return next(version for version, key, *_ in found if key == group_id)


def test_without_it_they_do() -> None:
    """Negative control: the same parts, the asynchronous pipeline by the bound alone."""
    runs = [play(num_workers, delays, max_staleness=1) for num_workers, delays in ((1, 0), (1, 1), (2, 2), (4, 3))]
    assert any(run != runs[0] for run in runs[1:])


def test_a_resume_without_it_is_another_run() -> None:
    """Negative control: what was open is played again, with seeds of its own."""
    synchronous = PIPELINES["synchronous"]
    assert play(1, 0, resume="recorded", **synchronous) != play(1, 0, **synchronous)


def test_a_retry_without_it_is_another_trajectory() -> None:
    """Negative control of the seeds: only deterministic runs play a failed member again as it was."""
    synchronous = PIPELINES["synchronous"]
    assert play(1, 1, 0.15, **synchronous) != play(1, 1, 0.0, **synchronous)
