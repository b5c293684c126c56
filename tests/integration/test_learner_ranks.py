"""A learner with a rank on each of two Dask workers: it trains what one rank trains, and survives the loss of one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
import torch
from distributed import Client, LocalCluster

from flows.server import prefect_server
from flows.train import train
from resources.failures import InfrastructureFailure
from resources.object_store import ObjectStore
from resources.policy.directory import weights_digest
from resources.pools.actors import ActorHandle, call_sync
from resources.pools.placement import release_actor, start_actor, workers_by_class
from resources.rollout.messages import Batch, BatchGroup, BatchMember
from resources.runs import RunRef
from resources.telemetry.metrics import read_metrics
from resources.trajectories.batch import write_batch
from resources.trajectories.store import TrajectoryWriter
from resources.trajectories.trajectory import Turn
from resources.weights.store import WeightStore
from tasks.training.config import OptimizerConfig, TrainingConfig
from tasks.training.learner import Learner
from tests.integration.stack_runs import small_config
from tests.trajectory_factory import make_trajectory
from tests.unit.test_tasks_training_learner import make_batch
from tests.unit.test_tasks_training_model import make_model_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = TrainingConfig(
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_updates=0), minibatches=2, collective_timeout_s=60
)
ANSWER_S = 240.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "120s"}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, resources={"learner": 1}, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def write_batches(store: ObjectStore, num_batches: int) -> None:
    async def write() -> None:
        for version in range(num_batches):
            writer = TrajectoryWriter(store, "run", f"w{version}", seal_after_s=0.001)
            groups: dict[str, list[BatchMember]] = {}
            families = {}
            for number, row in enumerate(make_batch(version)):
                ref = await writer.write(
                    make_trajectory(
                        number,
                        num_tokens=len(row.token_ids),
                        trajectory_id=row.trajectory_id.replace("/", "-"),
                        rollout_id=row.rollout_id,
                        family=row.family,
                        group_id=row.group_id,
                        temperature=row.temperature,
                        token_ids=row.token_ids,
                        loss_mask=row.loss_mask,
                        behaviour_logprobs=row.behaviour_logprobs,
                        token_versions=row.token_versions,
                        prompt_length=4,
                        turns=[Turn(0, 4, 6), Turn(6, 8, 9)],  # what `make_batch` samples
                    )
                )
                member = BatchMember(
                    row.trajectory_id.replace("/", "-"), ref, row.reward, None, "environment", "1", version
                )
                groups.setdefault(row.group_id, []).append(member)
                families[row.group_id] = row.family
            await writer.close()
            write_batch(
                store,
                Batch("run", version, tuple(BatchGroup(g, families[g], 0, tuple(m)) for g, m in groups.items())),
            )

    asyncio.run(write())


def start_learner(
    client: Client,
    run: RunRef,
    directory: Path,
    worker: str | None = None,
    config: TrainingConfig = CONFIG,
    **replaced: int,
) -> ActorHandle:
    from tasks.training.owner import LearnerActor

    return start_actor(
        client,
        LearnerActor,
        run.model_dump(),
        config.model_dump(mode="json"),
        str(directory),
        0,
        10,
        2,
        1,
        hardware_class="learner",
        worker=worker or workers_by_class(client)["learner"][0],
        name="learner",
        timeout_s=ANSWER_S,
        **replaced,
    )


def assert_trained_once(store: ObjectStore, directory: Path) -> None:
    """Version 2 holds what one rank makes of two batches."""
    alone = Learner(directory, CONFIG, seed=0, total_updates=10)
    for version in (0, 1):
        alone.update(make_batch(version), version, num_families=2, max_staleness=1)
    published = WeightStore(store, "run").fetch(2)
    for name, tensor in alone.tensors().items():
        assert float((tensor - published[name]).abs().max()) <= 1e-5, name


def test_a_rank_on_each_worker_and_the_loss_of_one(client: Client, directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path / "store"))
    run = RunRef(run_id="run", store_url=store.url)
    write_batches(store, 3)
    learner = start_learner(client, run, directory)
    call_sync(learner, "publish", 0, timeout_s=ANSWER_S)
    assert call_sync(learner, "update", 0, timeout_s=ANSWER_S)["num_ranks"] == 2
    assert call_sync(learner, "publish", 1, timeout_s=ANSWER_S)["version"] == 1

    other = workers_by_class(client)["learner"][1]
    pids = client.run(os.getpid)
    os.kill(pids[other], signal.SIGKILL)
    with pytest.raises(InfrastructureFailure, match=r"learner rank 1 of 2 \(actor learner-rank-1 .*failed during upd"):
        call_sync(learner, "update", 1, timeout_s=ANSWER_S)
    metrics = call_sync(learner, "update", 1, timeout_s=ANSWER_S)
    assert metrics["num_ranks"] == 2, "the nanny's new worker took the lost one's place"
    assert metrics["optimizer_steps/total"] == 4, "the batch was trained once"
    with pytest.raises(ValueError, match="holds version 2; batch 1 is not the next"):
        call_sync(learner, "update", 1, timeout_s=ANSWER_S)
    call_sync(learner, "publish", 2, timeout_s=ANSWER_S)
    call_sync(learner, "close", timeout_s=ANSWER_S)
    release_actor(learner)

    assert_trained_once(store, directory)
    first, second = (WeightStore(store, "run").fetch(version)["model.norm.weight"] for version in (1, 2))
    assert not torch.equal(first, second)


def test_the_first_rank_dies_between_two_updates(client: Client, directory: Path, tmp_path: Path) -> None:
    """The learner is built again on the worker of the other rank, whose process was in the group that is gone; it
    waits for the lost worker's successor, and has as many ranks as before."""
    store = ObjectStore.open(str(tmp_path / "store"))
    run = RunRef(run_id="run", store_url=store.url)
    write_batches(store, 2)
    first, other = workers_by_class(client)["learner"]
    learner = start_learner(client, run, directory)
    call_sync(learner, "update", 0, timeout_s=ANSWER_S)
    call_sync(learner, "publish", 1, timeout_s=ANSWER_S)
    os.kill(client.run(os.getpid, workers=[first])[first], signal.SIGKILL)
    with pytest.raises(InfrastructureFailure):
        call_sync(learner, "update", 1, timeout_s=ANSWER_S)
    learner = start_learner(client, run, directory, other, resume_version=1, num_ranks=2)
    metrics = call_sync(learner, "update", 1, timeout_s=ANSWER_S)
    assert metrics["num_ranks"] == 2 and metrics["optimizer_steps/total"] == 4
    call_sync(learner, "publish", 2, timeout_s=ANSWER_S)
    call_sync(learner, "close", timeout_s=ANSWER_S)
    release_actor(learner)
    assert_trained_once(store, directory)


def test_a_rank_that_hangs_fails_the_update_in_time_and_is_replaced(
    client: Client, directory: Path, tmp_path: Path
) -> None:
    store = ObjectStore.open(str(tmp_path / "store"))
    run = RunRef(run_id="run", store_url=store.url)
    write_batches(store, 2)
    other = workers_by_class(client)["learner"][1]
    config = CONFIG.model_copy(update={"collective_timeout_s": 30.0})
    learner = start_learner(client, run, directory, config=config)
    call_sync(learner, "update", 0, timeout_s=ANSWER_S)
    call_sync(learner, "publish", 1, timeout_s=ANSWER_S)
    stopped = client.run(os.getpid, workers=[other])[other]
    os.kill(stopped, signal.SIGSTOP)
    # The collective's timeout, and as long again for an answer of the rank that hangs.
    with pytest.raises(InfrastructureFailure, match=r"learner rank 1 of 2 .* no answer within 30 s"):
        call_sync(learner, "update", 1, timeout_s=3 * config.collective_timeout_s)
    metrics = call_sync(learner, "update", 1, timeout_s=ANSWER_S)
    assert metrics["optimizer_steps/total"] == 4, "the batch was trained once"
    assert stopped not in client.run(os.getpid).values(), "its process was replaced"
    call_sync(learner, "publish", 2, timeout_s=ANSWER_S)
    call_sync(learner, "close", timeout_s=ANSWER_S)
    release_actor(learner)
    assert_trained_once(store, directory)


def test_a_run_with_two_learner_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pools.classes.learner.num_workers=2`` is all it takes. It trains an adapter, which is published alone."""
    monkeypatch.setenv("ROLLART_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    config = small_config(
        tmp_path / "store", "two-ranks", num_iterations=2, evaluation={"before": False, "after": False}
    )
    with prefect_server():
        overrides = {"pools.classes.learner.num_workers": 2, "training.lora": {"rank": 4, "alpha": 8}}
        summary = train(config, overrides=overrides)
    store = ObjectStore.open(str(tmp_path / "store"))
    rows = read_metrics(store.sub(f"runs/{summary['run_id']}"))
    assert [row["num_ranks"] for row in rows] == [2, 2]
    weights = WeightStore(store, summary["run_id"])
    assert weights.versions() == [0, 1, 2]
    base = weights.policy_directory(0)
    for version in weights.versions():
        manifest = weights.manifest(version)
        assert manifest.adapter is not None and manifest.adapter.base_digest == weights_digest(base)
        assert manifest.num_bytes < (base / "model.safetensors").stat().st_size / 10
    assert [row["weights/num_bytes"] for row in rows] == [weights.num_bytes(version) for version in (1, 2)]
