"""The learner's owner: a batch is trained once, and again, bitwise, by a learner that was rebuilt behind its update."""

from __future__ import annotations

from pathlib import Path

import pytest

import tasks.training.rank
from resources.object_store import ObjectStore
from resources.runs import RunRef, checkpoint_versions
from tasks.training.config import TrainingConfig
from tasks.training.owner import LearnerActor
from tests.unit.test_tasks_training_learner import OPTIMIZER, make_batch
from tests.unit.test_tasks_training_model import make_model_directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def written_batches(monkeypatch) -> list[int]:
    """Batches as the test writes them; which ones were read."""
    read: list[int] = []

    class NoGroups:
        groups = ()

        def __init__(self, version: int) -> None:
            self.version = version

    def read_batch(store, run_id, version):
        read.append(version)
        return NoGroups(version)

    monkeypatch.setattr(tasks.training.rank, "read_batch", read_batch)
    monkeypatch.setattr(tasks.training.rank, "read_trajectories", lambda store, refs: [])
    monkeypatch.setattr(tasks.training.rank, "training_rows", lambda batch, *_: make_batch(batch.version))
    monkeypatch.setattr(tasks.training.rank, "generation_seconds", lambda rows: {})
    return read


def owner(store: ObjectStore, directory: Path, version: int | None) -> LearnerActor:
    run = RunRef(run_id="run", store_url=store.url)
    config = TrainingConfig.model_validate({"optimizer": OPTIMIZER, "minibatches": 2}).model_dump(mode="json")
    return LearnerActor(run.model_dump(), config, str(directory), 0, 10, 2, 1, resume_version=version)


def digest(learner: LearnerActor, version: int) -> str:
    return learner.group.first.weights.manifest(version).files["model.safetensors"].sha256


def test_a_rebuilt_learner_trains_the_batch_that_was_in_training_again(tmp_path, directory, written_batches):
    """It was lost between update and publication: what it publishes is bitwise what would have been published."""
    undisturbed = owner(ObjectStore.open(str(tmp_path / "one")), directory, None)
    store = ObjectStore.open(str(tmp_path / "other"))
    lost = owner(store, directory, None)
    for learner in (undisturbed, lost):
        learner.publish(0)
        learner.update(0)
        learner.publish(1)
        learner.update(1)
    undisturbed.publish(2)
    del lost

    newest = checkpoint_versions(RunRef(run_id="run", store_url=store.url))[-1]
    assert newest == 1
    rebuilt = owner(store, directory, newest)
    written_batches.clear()
    rebuilt.publish(2)
    assert written_batches == [1], "trained again once"
    assert digest(rebuilt, 2) == digest(undisturbed, 2) and digest(rebuilt, 2) != digest(rebuilt, 1)
    rebuilt.publish(2)
    assert written_batches == [1], "a publication that is asked for again trains nothing"


def test_a_learner_that_was_lost_behind_its_checkpoint_trains_nothing_again(tmp_path, directory, written_batches):
    store = ObjectStore.open(str(tmp_path / "store"))
    lost = owner(store, directory, None)
    lost.publish(0)
    lost.update(0)
    lost.publish(1)
    first = digest(lost, 1)
    rebuilt = owner(store, directory, 1)
    written_batches.clear()
    rebuilt.publish(1)
    assert written_batches == [] and digest(rebuilt, 1) == first
    with pytest.raises(ValueError, match="holds version 1; batch 0 is not the next one"):
        rebuilt.update(0)


def test_nobody_waits_in_a_collective_while_a_version_is_written(tmp_path, directory, monkeypatch):
    """The other ranks' part of a version ends with its last gathering; they come back for the checkpoint."""
    learner = owner(ObjectStore.open(str(tmp_path / "store")), directory, None)
    asked: list[str] = []
    together, rank = learner.group.together, learner.group.first
    monkeypatch.setattr(learner.group, "together", lambda method, *of: asked.append(method) or together(method, *of))
    assert rank is not None
    save, publish = rank.learner.save, rank.weights.publish
    monkeypatch.setattr(rank.learner, "save", lambda *of: asked.append("gather moments") or save(*of))
    monkeypatch.setattr(rank.weights, "publish", lambda *of, **named: asked.append("write") or publish(*of, **named))
    report = learner.publish(0)
    assert asked == ["write_version", "write", "write_checkpoint", "gather moments"]
    assert report.keys() == {"version", "num_bytes", "publish_s", "checkpoint_s"}


def test_a_version_that_cannot_be_made_is_refused(tmp_path, directory):
    with pytest.raises(ValueError, match="holds version 0 and cannot publish version 2"):
        owner(ObjectStore.open(str(tmp_path / "store")), directory, None).publish(2)
