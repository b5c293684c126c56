"""The real rollout plane in one process, driven without the flow around it: group queue, gate, rollout worker, proxy,
simulated engines, trajectory and weight store. The learner is a wait and a publication.

Prefect and Dask are left out because what they take an iteration is the same whatever the work is
(`benchmarks.overhead` measures it): nothing beside iterations of minutes, and a good part of these, scaled to seconds.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.pipeline_workloads import ENVIRONMENT, Pipeline, WaitingEnvironment, Workload
from resources.engines.actor import EngineActor
from resources.engines.config import EngineConfig
from resources.engines.simulated_config import ScriptedAnswers, SimulatedConfig
from resources.environments.family import FamilyConfig
from resources.object_store import ObjectStore
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy
from resources.rollout.config import RolloutConfig
from resources.rollout.group_queue import GroupQueue
from resources.rollout.messages import Batch
from resources.rollout.worker import RolloutWorker
from resources.trajectories.store import read_trajectories
from resources.weights.store import WeightStore

RUN = "run"
TIME_SCALE = 100.0
DEADLINE_S = 120.0
ANSWERS = ScriptedAnswers(length="lognormal", mean_tokens=100, sigma=0.5)


@dataclass(frozen=True)
class Played:
    """``loads``: moments at which versions 1, 2, ... were loaded, in seconds of `time.perf_counter`."""

    loads: list[float]
    waves_s: list[float]
    """By batch: its longest trajectory."""
    lags: Counter[int]
    num_evicted: int


class OnLoop:
    """An actor's stand-in in this process: its methods run on the loop that it belongs to, whoever calls them."""

    def __init__(self, actor: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._actor, self._loop = actor, loop

    def __getattr__(self, method: str) -> Any:
        async def run(*arguments: Any, **named: Any) -> Any:
            coroutine = getattr(self._actor, method)(*arguments, **named)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

        return run


def play(workload: Workload, pipeline: Pipeline, training_s: float, num_iterations: int) -> Played:
    """Iterations of a workload through a pipeline; the learner takes ``training_s`` seconds for each."""
    WaitingEnvironment.begin_run()
    with tempfile.TemporaryDirectory(prefix="rollart-pipeline-") as folder:
        return asyncio.run(_play(workload, pipeline, training_s, num_iterations, Path(folder)))


async def _play(workload: Workload, pipeline: Pipeline, training_s: float, number: int, folder: Path) -> Played:
    store = ObjectStore.open(str(folder / "store"))
    small = PolicyConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64, context_length=2048
    )
    policy = create_tiny_policy(folder / "policy", small, ["go on 0123456789 abcdefghijklmnopqrstuvwxyz"], seed=0)
    weights = WeightStore(store, RUN)
    files = {path.name: path.read_bytes() for path in policy.iterdir() if path.suffix in (".json", ".jinja")}

    def publish(version: int) -> None:
        # What a simulated engine loads has the size that its configuration says, not this one.
        weights.publish(version, {"version": torch.tensor([version])}, files=files)

    publish(0)
    arguments = {"step_s": workload.step_s, "sigma": workload.sigma}
    common: dict[str, Any] = {"environment": ENVIRONMENT, "arguments": arguments, "max_new_tokens": 256}
    families = {
        name: FamilyConfig(hardware_class=name, groups_per_iteration=4, group_size=4, **common)
        for name in ("compute", "bandwidth")
    }
    rollout = RolloutConfig(
        pipeline=pipeline.pipeline,  # pyright: ignore[reportArgumentType]
        max_staleness=pipeline.max_staleness,
        length_finish="step",
        seal_after_s=0.01,
        max_reissues=100,
    )
    engine = EngineConfig(
        backend="simulated", num_slots=256, simulated=SimulatedConfig(time_scale=TIME_SCALE, answers=ANSWERS)
    )
    loop = asyncio.get_running_loop()
    queue = GroupQueue(RUN, store.url, families, rollout, seed=0)
    engines = {name: EngineActor(store.url, RUN, 0, engine, name, f"{name}-0") for name in families}
    handles = {name: [(f"{name}-0", OnLoop(actor, loop))] for name, actor in engines.items()}
    worker = await asyncio.to_thread(
        RolloutWorker, "w0", RUN, store.url, OnLoop(queue, loop), handles, families, rollout
    )
    try:
        loads, batches = [], []
        for version in range(number):
            batches.append(await queue.collect(version, DEADLINE_S))
            await asyncio.sleep(training_s)
            await asyncio.to_thread(publish, version + 1)
            await _switch(list(engines.values()), queue, version + 1)
            loads.append(time.perf_counter())
        counts = (await queue.stats())["families"]
    finally:
        await queue.close()
        await worker.close()
        for actor in engines.values():
            await actor.close()
    evicted = sum(family["counts"].get("evicted_groups", 0) for family in counts.values())
    return _measure(store, loads, batches, evicted)


async def _switch(engines: list[EngineActor], queue: GroupQueue, version: int) -> None:
    """What the stage `switch-weights` does."""
    await asyncio.gather(*(engine.prefetch(version) for engine in engines))
    await queue.wait_loadable(version, DEADLINE_S)
    await asyncio.gather(*(engine.suspend() for engine in engines))
    await asyncio.gather(*(engine.load(version) for engine in engines))
    await queue.version_loaded(version)
    await asyncio.gather(*(engine.resume() for engine in engines))


def _measure(store: ObjectStore, loads: list[float], batches: list[Batch], num_evicted: int) -> Played:
    waves_s, lags = [], Counter[int]()
    for batch in batches:
        of_batch = []
        for group in batch.groups:
            rows = read_trajectories(store, [member.ref for member in group.members])
            of_batch.append(max(row.finished_at - row.started_at for row in rows))
            lags.update(batch.version - row.oldest_version for row in rows if row.oldest_version is not None)
        waves_s.append(max(of_batch))
    return Played(loads, waves_s, lags, num_evicted)
