"""The rollout plane in one process, without Dask: real engine, stores, environments and reward queue, two families,
one of them played in child processes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from resources.engines.actor import EngineActor
from resources.engines.config import EngineConfig
from resources.environments.family import FamilyConfig
from resources.object_store import ObjectStore
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy
from resources.rewards.queue import RewardQueue
from resources.rewards.scorers import resolve_scorer
from resources.rollout.config import RolloutConfig
from resources.rollout.group_queue import GroupQueue
from resources.rollout.worker import RolloutWorker
from resources.trajectories.batch import read_batch, write_batch
from resources.trajectories.digest import batch_digest
from resources.trajectories.store import read_trajectories
from resources.weights.store import WeightStore

RUN = "run"
CORPUS = [
    "math: <tool>expression</tool> then <answer>number</answer>", "<tool>12+3</tool>", "<answer>15</answer>",
    "guess a number from 1 to 7: <answer>4</answer>", "higher", "lower", "0123456789 +-*=()<>/",
]  # fmt: skip


class OnLoop:
    """An actor's stand-in: its methods run on the loop that it belongs to, whoever calls them."""

    def __init__(self, actor, loop: asyncio.AbstractEventLoop):
        self._actor, self._loop = actor, loop

    def __getattr__(self, method):
        async def run(*arguments, **named):
            coroutine = getattr(self._actor, method)(*arguments, **named)
            if asyncio.get_running_loop() is self._loop:
                return await coroutine
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

        return run


class HeldQueue:
    """Answers no worker before all of them are there, so that none has played everything by then."""

    def __init__(self, queue: GroupQueue):
        self._queue, self.opened = queue, asyncio.Event()

    async def exchange(self, report, wait_s):
        await self.opened.wait()
        return await self._queue.exchange(report, wait_s)

    async def worker_blocked(self, worker_id, trajectory_id, message):
        await self._queue.worker_blocked(worker_id, trajectory_id, message)


class RewardThread:
    """One replica: claims, scores, completes."""

    def __init__(self, store: ObjectStore):
        self._queue = RewardQueue(store, RUN)
        self._scorer = resolve_scorer("exact_answer")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            claim = self._queue.claim("thread", 30.0)
            if claim is None:
                time.sleep(0.02)
                continue
            self._queue.complete(claim, [self._scorer.score(request) for request in claim.requests])

    def stop(self):
        self._stop.set()
        self._thread.join(5)


def families() -> dict[str, FamilyConfig]:
    common = dict(groups_per_iteration=2, group_size=3, max_new_tokens=6)
    return {
        "guess": FamilyConfig(environment="guess_number", hardware_class="compute", executor="process", **common),
        "math": FamilyConfig(environment="calculator", hardware_class="bandwidth", scorer="exact_answer", **common),
    }


def delayed_families() -> dict[str, FamilyConfig]:
    """The same in threads, with random latencies."""
    paths = {"guess": "DelayedGuessNumber", "math": "DelayedCalculator"}
    delayed = "tests.integration.delayed_environments"
    return {
        name: family.model_copy(update={"environment": f"{delayed}:{paths[name]}", "executor": "thread"})
        for name, family in families().items()
    }


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    config = PolicyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64)
    return create_tiny_policy(tmp_path_factory.mktemp("policy"), config, CORPUS, seed=0)


def publish(store: ObjectStore, policy: Path, version: int) -> None:
    untrained = load_file(policy / "model.safetensors")
    tensors = {name: tensor * (1.0 + 0.01 * version) for name, tensor in untrained.items()}
    files = {path.name: path.read_bytes() for path in policy.iterdir() if path.suffix in (".json", ".jinja")}
    WeightStore(store, RUN).publish(version, tensors, files=files)


async def switch_weights(engines: list[EngineActor], queue: GroupQueue, version: int) -> None:
    for engine in engines:
        await engine.prefetch(version)
    for engine in engines:
        await engine.suspend()
    for engine in engines:
        await engine.load(version)
    await queue.version_loaded(version)
    for engine in engines:
        await engine.resume()


async def run_iterations(
    store: ObjectStore,
    policy: Path,
    config: RolloutConfig,
    number: int,
    played: dict[str, FamilyConfig] | None = None,
    num_workers: int = 1,
    engines_per_class: int = 1,
    loses_engines: bool = False,
):
    """``loses_engines``: under version 0 an engine of each class dies at work; another one is built in its place."""
    publish(store, policy, 0)
    loop = asyncio.get_running_loop()
    engine_config = EngineConfig(num_slots=8, batch_invariant=config.deterministic)

    def build(name: str, version: int) -> EngineActor:
        return EngineActor(store.url, RUN, version, engine_config, name.split("-")[0], name)

    names = [f"{name}-{index}" for name in ("compute", "bandwidth") for index in range(engines_per_class)]
    engines = {name: build(name, 0) for name in names}
    played = played or families()
    queue = GroupQueue(RUN, store.url, played, config, seed=7)

    def as_handles() -> dict[str, list[tuple[str, OnLoop]]]:
        found: dict[str, list[tuple[str, OnLoop]]] = {}
        for name, engine in engines.items():
            found.setdefault(name.split("-")[0], []).append((name, OnLoop(engine, loop)))
        return found

    async def lose_engines() -> None:
        lost = []
        async with asyncio.timeout(30):
            for hardware_class in ("compute", "bandwidth"):
                of_class = [name for name in names if name.startswith(hardware_class)]
                while not (busy := [name for name in of_class if (await engines[name].stats()).num_running]):
                    await asyncio.sleep(0.001)
                await engines[busy[0]].close()
                lost.append(busy[0])
            await asyncio.sleep(0.1)  # meanwhile the others play
            for name in lost:
                engines[name] = await asyncio.to_thread(build, name, 0)
            for worker in workers:
                await worker.set_engines(as_handles())

    handles = as_handles()
    held = HeldQueue(queue)
    workers = [
        await asyncio.to_thread(RolloutWorker, f"w{index}", RUN, store.url, OnLoop(held, loop), handles, played, config)
        for index in range(num_workers)
    ]
    losing = asyncio.create_task(lose_engines() if loses_engines else asyncio.sleep(0))
    held.opened.set()
    try:
        batches = []
        for version in range(number):
            batches.append(await queue.collect(version, 60.0))
            write_batch(store, batches[-1])
            publish(store, policy, version + 1)
            if config.pipeline == "asynchronous":
                await asyncio.sleep(0.2)  # rollouts go on under the old weights
            await queue.wait_loadable(version + 1, 60.0)
            await losing
            await switch_weights(list(engines.values()), queue, version + 1)
        evaluation = await queue.evaluate({"guess": 3, "math": 2}, seed=1, evaluate_timeout_s=60.0, greedy=True)
        stats = await workers[0].stats()
        json.dumps([stats, await queue.stats(), await queue.snapshot()])
        return batches, evaluation, stats
    finally:
        await queue.close()
        for worker in workers:
            await worker.close()
        for engine in engines.values():
            await engine.close()


@pytest.mark.parametrize("pipeline", ["synchronous", "asynchronous", "one_off"])
def test_three_batches_with_version_bumps(tmp_path, policy, pipeline):
    """S1 at alpha 0: every trained token has the learner's version; at alpha 1 the lag is at most 1; in the one-off
    pipeline it is 1 for every token, but for the first batch."""
    store = ObjectStore.open(str(tmp_path))
    alpha = 0 if pipeline == "synchronous" else 1
    config = RolloutConfig(pipeline=pipeline, max_staleness=alpha, seal_after_s=0.05, score_window_s=0.02)
    rewards = RewardThread(store)
    try:
        batches, evaluation, stats = asyncio.run(run_iterations(store, policy, config, 3))
    finally:
        rewards.stop()
    seen: set[str] = set()
    lags = []
    for version, batch in enumerate(batches):
        assert read_batch(store, RUN, version) == batch
        assert sorted(group.family for group in batch.groups) == ["guess", "guess", "math", "math"]
        assert seen.isdisjoint(group.group_id for group in batch.groups)
        seen |= {group.group_id for group in batch.groups}
        members = [member for group in batch.groups for member in group.members]
        assert len(members) == 12
        rows = read_trajectories(store, [member.ref for member in members])
        for member, row in zip(members, rows, strict=True):
            assert row.trajectory_id == member.trajectory_id
            assert row.oldest_version == member.oldest_version
            versions = np.unique(row.token_versions[row.loss_mask])
            assert all(version - alpha <= v <= version for v in versions)
            lags += [version - int(v) for v in versions]
            if pipeline == "one_off":
                assert versions.tolist() in ([], [max(0, version - 1)])
            inline = row.family == "guess"
            assert (row.reward is not None) == inline and member.reward is not None
            assert member.scorer == ("environment" if inline else "exact_answer")
            assert {turn.hardware_class for turn in row.turns} == {"compute" if inline else "bandwidth"}
        seeds = [row.seed_sampling for row in rows]
        assert len(set(seeds)) == len(seeds)
        assert batch.counters["lag_max/guess"] <= alpha
    assert max(lags) == alpha, "at alpha 1 some tokens are one version old, or the pipeline did not overlap"
    assert [len(group.members) for group in evaluation] == [1] * 5
    eval_rows = read_trajectories(store, [group.members[0].ref for group in evaluation])
    assert {row.split for row in eval_rows} == {"eval"} and {row.newest_version for row in eval_rows} == {3}
    assert stats["proxy"]["num_fallbacks"] == {} and stats["proxy"]["num_rerouted"] == 0


@pytest.mark.parametrize("stepping", ["trajectory", "batch"])
def test_a_deterministic_run_is_the_same_with_any_number_of_workers(tmp_path, policy, stepping):
    """Real engines, environments that take random times, one worker, two and four: equal bits in every batch."""
    found = []
    for num_workers in (1, 2, 4):
        store = ObjectStore.open(str(tmp_path / str(num_workers)))
        config = RolloutConfig(
            deterministic=True, pipeline="one_off", stepping=stepping, seal_after_s=0.05, score_window_s=0.02,
            max_concurrent_trajectories=64 if num_workers == 1 else 12 // num_workers,
        )  # fmt: skip
        rewards = RewardThread(store)
        try:
            batches, _, _ = asyncio.run(run_iterations(store, policy, config, 2, delayed_families(), num_workers))
        finally:
            rewards.stop()
        files = {member.ref.file for batch in batches for group in batch.groups for member in group.members}
        players = {file.rsplit("/", 1)[-1].split("-")[0] for file in files}
        assert (len(players) > 1) == (num_workers > 1), "the work was shared"
        found.append([batch_digest(store, batch) for batch in batches])
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 2


def test_a_deterministic_run_is_the_same_when_engines_are_lost_and_built_again(tmp_path, policy):
    """What a lost engine had sampled is gone on with by another one, in the middle of a turn: the same bits."""
    found, rerouted = [], []
    for loses_engines in (False, True):
        store = ObjectStore.open(str(tmp_path / str(loses_engines)))
        config = RolloutConfig(
            deterministic=True, pipeline="one_off", seal_after_s=0.05, score_window_s=0.02, engine_cooldown_s=0.2
        )
        rewards = RewardThread(store)
        try:
            batches, _, stats = asyncio.run(
                run_iterations(
                    store, policy, config, 3, delayed_families(), engines_per_class=2, loses_engines=loses_engines
                )
            )
        finally:
            rewards.stop()
        rerouted.append(stats["proxy"]["num_rerouted"])
        found.append([batch_digest(store, batch) for batch in batches])
    assert rerouted[0] == 0 and rerouted[1] > 0
    assert found[0] == found[1] and len(set(found[0])) == 3
