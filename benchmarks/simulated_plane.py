"""The rollout plane in one process over simulated engines: the real group queue, gate, worker loop, EnvManagers, proxy,
exchanges and trajectory writer, on one event loop. Only the engines' arithmetic and the environments' latencies are
pretended; actor calls between processes are left out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from resources.clock import Clock
from resources.engines.actor import EngineActor
from resources.engines.config import EngineConfig
from resources.engines.simulated import SimulatedEngine
from resources.environments.base import Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.environments.registry import make_environment
from resources.object_store import ObjectStore
from resources.policy.chat_format import ChatFormat
from resources.policy.tokenizer import train_tokenizer
from resources.pools.actors import call
from resources.rewards.queue import RewardQueue
from resources.rewards.scorers import resolve_scorer
from resources.rollout.config import RolloutConfig
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.episode_services import EpisodeServices
from resources.rollout.group_queue import GroupQueue
from resources.rollout.handover import Handover, ScoreSubmitter
from resources.rollout.proxy import LLMProxy
from resources.rollout.stepping import BatchStepping, TrajectoryStepping
from resources.rollout.worker_loop import WorkerLoop
from resources.trajectories.store import TrajectoryWriter

RUN_ID = "benchmark"
ENVIRONMENT = "benchmarks.simulated_plane:LatencyEnvironment"


class LatencyEnvironment:
    """Every step takes a time drawn from N(mean, sigma), not below 0: a wait that costs no CPU."""

    env_version = "1"

    def __init__(self, turns: int, mean_s: float, sigma_s: float = 0.0) -> None:
        self.max_turns = turns
        self._mean_s, self._sigma_s = mean_s, sigma_s

    async def reset(self, seed: int) -> list[Message]:
        self._seed, self._turn = seed, 0
        return [Message(role="user", content="begin")]

    async def step(self, action: str) -> StepOutcome:
        await asyncio.sleep(draw_latency(self._seed, self._turn, self._mean_s, self._sigma_s))
        self._turn += 1
        if self._turn == self.max_turns:
            return StepOutcome([], reward=1.0, terminated=True, success=True)
        return StepOutcome([Message(role="user", content="go on")])


def draw_latency(seed: int, turn: int, mean_s: float, sigma_s: float) -> float:
    """Seconds that a step takes; known to whoever knows the episode's seed, and nothing to keep for who waits."""
    return max(0.0, random.Random(f"{seed}/{turn}").gauss(mean_s, sigma_s))


class PolicyDirectory:
    """A version source that has every version: a tokenizer and nothing else."""

    def __init__(self, directory: Path) -> None:
        corpus = ["begin", "go on"] * 10
        tokenizer = train_tokenizer(corpus, vocab_size=320, min_word_frequency=10, context_length=4096)
        tokenizer.save_pretrained(directory)
        self.path = directory

    def policy_directory(self, version: int) -> Path:
        return self.path


@dataclass
class SimulatedPlane:
    """Everything that runs, for a benchmark to look at."""

    queue: GroupQueue
    engines: list[SimulatedEngine]
    proxy: LLMProxy
    worker_loop: WorkerLoop
    store: ObjectStore


@asynccontextmanager
async def simulated_plane(
    folder: Path,
    families: Mapping[str, FamilyConfig],
    rollout: RolloutConfig,
    engine: EngineConfig,
    *,
    num_engines: int = 1,
    num_batches: int | None = None,
    seed: int = 0,
    clock: Clock | None = None,
) -> AsyncIterator[SimulatedPlane]:
    """One rollout worker and ``num_engines`` engines of class ``compute``, until the block ends."""
    store = ObjectStore.open(str(folder / "store"))
    policy = PolicyDirectory(folder / "policy")
    queue = GroupQueue(RUN_ID, store.url, families, rollout, seed, num_batches=num_batches)
    engines = [
        SimulatedEngine(f"compute-{index}", "compute", policy, 0, engine, clock=clock) for index in range(num_engines)
    ]
    actors = [(one.name, EngineActor.around(one)) for one in engines]
    writer = TrajectoryWriter(store, RUN_ID, "w0", seal_bytes=rollout.seal_bytes, seal_after_s=rollout.seal_after_s)
    submitter = ScoreSubmitter(RewardQueue(store, RUN_ID).submit, rollout.score_window_s)
    scorers = {name: resolve_scorer(family.scorer, family.scorer_arguments) for name, family in families.items()}
    handover = Handover(families, scorers, writer, submitter)
    worker_loop = WorkerLoop("w0", queue, families, rollout, handover, call=call)
    proxy = LLMProxy("p0", {"compute": actors}, rollout, call=call)
    services = EpisodeServices(
        chat=EncodingCache(ChatFormat.from_directory(policy.path)),
        proxy=proxy,
        make_environment=lambda name, family: make_environment(family, family=name),
        context_length=engine.context_length or 4096,
        on_first_sampled=worker_loop.note_first_sampled,
        stepping=BatchStepping() if rollout.stepping == "batch" else TrajectoryStepping(),
    )
    playing = asyncio.ensure_future(worker_loop.run(services))
    try:
        yield SimulatedPlane(queue, engines, proxy, worker_loop, store)
    finally:
        await queue.close()
        worker_loop.stop()
        await asyncio.wait_for(playing, 60.0)
        await proxy.close()
        for one in engines:
            await one.close()
        await submitter.close()
        await writer.close()
