"""A streamed update from manifests and trajectory files: groups are read once, and the manifest decides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tasks.training.rank
from resources.object_store import ObjectStore
from resources.rollout.messages import Batch, BatchGroup, BatchMember
from resources.runs import RunRef
from resources.trajectories.batch import write_batch
from resources.trajectories.store import TrajectoryWriter
from resources.trajectories.trajectory import TrajectoryRef
from tasks.training.config import TrainingConfig
from tasks.training.owner import LearnerActor
from tests.trajectory_factory import make_trajectory
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_streamed import ONE_STEP, STREAMED

NUM_GROUPS, NUM_MEMBERS = 4, 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    return ObjectStore.open(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def batch(store: ObjectStore) -> Batch:
    """Batch 0, its trajectories written and its manifest not."""

    async def write() -> list[BatchGroup]:
        writer = TrajectoryWriter(store, "run", "worker-0")
        groups = []
        for number in range(NUM_GROUPS):
            members = []
            for member in range(NUM_MEMBERS):
                trajectory = trajectory_of(number, member)
                ref = await writer.write(trajectory)
                members.append(
                    BatchMember(trajectory.trajectory_id, ref, float(member % 2), member % 2 > 0, "environment", "1", 0)
                )
            groups.append(BatchGroup(f"calculator-{number:06d}", "calculator", number, tuple(members)))
        await writer.close()
        return groups

    return Batch("run", 0, tuple(asyncio.run(write())))


def trajectory_of(number: int, member: int) -> Any:
    num_tokens = 9 + number + member
    whole = make_trajectory(member, num_tokens=num_tokens)
    rng = np.random.default_rng([number, member])
    return make_trajectory(
        member,
        num_tokens=num_tokens,
        trajectory_id=f"run/calculator-{number:06d}/{member}/0",
        rollout_id=f"run/calculator-{number:06d}/{member}/0",
        group_id=f"calculator-{number:06d}",
        token_ids=rng.integers(0, 40, num_tokens).astype(np.int32),
        token_versions=np.where(whole.loss_mask, 0, -1).astype(np.int32),
    )


def owner(store: ObjectStore, directory: Path, settings: dict[str, Any], version: int | None = None) -> LearnerActor:
    run = RunRef(run_id="run", store_url=store.url)
    config = TrainingConfig.model_validate(settings).model_dump(mode="json")
    return LearnerActor(run.model_dump(), config, str(directory), 0, 10, 1, 1, resume_version=version)


def weights(learner: LearnerActor) -> dict[str, Any]:
    rank = learner.group.first
    assert rank is not None
    return rank.learner.tensors()


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert float((tensor - other[name]).abs().max()) <= 1e-6, name


def test_groups_are_read_once_and_the_manifest_decides(
    store: ObjectStore, directory: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[TrajectoryRef] = []
    reading = tasks.training.rank.read_trajectories

    def counting(store: ObjectStore, refs: list[TrajectoryRef]) -> Any:
        read.extend(refs)
        return reading(store, refs)

    streamed = owner(store, directory, STREAMED)
    with pytest.raises(ValueError, match="holds version 0; batch 1 is not the next one"):
        streamed.stream(1, batch.groups[:1])
    write_batch(store, batch)
    whole = owner(store, directory, ONE_STEP)
    expected = whole.update(0)

    monkeypatch.setattr(tasks.training.rank, "read_trajectories", counting)
    streamed.stream(0, (batch.groups[2], batch.groups[0]))
    streamed.stream(0, (batch.groups[3],))
    metrics = streamed.update(0)
    assert len(read) == len(set(read)) == NUM_GROUPS * NUM_MEMBERS, "no trajectory is read twice"
    assert metrics["tokens/streamed"] > 0 and metrics["num_trajectories/calculator"] == NUM_GROUPS * NUM_MEMBERS
    assert metrics["prefill_s/calculator"] == pytest.approx(expected["prefill_s/calculator"])
    assert metrics["optimizer_steps/total"] == 1
    assert_same(weights(whole), weights(streamed))
    with pytest.raises(ValueError, match="holds version 1; batch 0 is not the next one"):
        streamed.update(0)
    with pytest.raises(ValueError, match="holds version 1; batch 0 is not the next one"):
        streamed.stream(0, batch.groups[:1])


def test_a_learner_that_was_lost_while_it_streamed_is_rebuilt_and_trains_the_batch_once(
    store: ObjectStore, directory: Path, batch: Batch
) -> None:
    write_batch(store, batch)
    whole, lost = owner(store, directory, ONE_STEP), owner(store, directory, STREAMED)
    whole.update(0)
    lost.stream(0, batch.groups[:3])
    del lost
    rebuilt = owner(store, directory, STREAMED)
    rebuilt.publish(0)
    rebuilt.stream(0, batch.groups[:2])
    assert rebuilt.update(0)["optimizer_steps/total"] == 1
    assert_same(weights(whole), weights(rebuilt))


def test_a_group_that_is_otherwise_in_the_manifest_is_trained_as_it_is_there(
    store: ObjectStore, directory: Path, batch: Batch
) -> None:
    write_batch(store, batch)
    first = batch.groups[0]
    members = tuple(BatchMember(m.trajectory_id, m.ref, 1.0, True, "environment", "1", 0) for m in first.members)
    whole, streamed = owner(store, directory, ONE_STEP), owner(store, directory, STREAMED)
    whole.update(0)
    streamed.stream(0, (BatchGroup(first.group_id, first.family, first.seed_env, members), batch.groups[1]))
    assert "tokens/streamed" not in streamed.update(0)
    assert_same(weights(whole), weights(streamed))
