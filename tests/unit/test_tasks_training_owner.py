"""The learner's owner between iterations: what stays in the run's folder, and what goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.object_store import ObjectStore
from resources.runs import RunRef
from tasks.training.config import TrainingConfig
from tasks.training.owner import LearnerActor
from tests.unit.test_tasks_training_model import make_model_directory


@pytest.fixture
def actor(tmp_path: Path) -> LearnerActor:
    run = RunRef(run_id="run", store_url=str(ObjectStore.open(str(tmp_path / "store")).url))
    model = make_model_directory(tmp_path / "model")
    config = TrainingConfig().model_dump(mode="json")
    return LearnerActor(run.model_dump(), config, str(model), 0, 10, 1, 1, checkpoint_keep=2)


def test_old_versions_leave_nothing_behind(actor: LearnerActor) -> None:
    """A folder left behind by every version would be listed in every later iteration."""
    for version in range(5):
        actor.version = version
        actor.publish(version)
    actor.prune([1, 4])
    folder = actor.folder.local_path("checkpoints")
    assert folder is not None
    assert sorted(path.name for path in folder.iterdir()) == ["v000001", "v000003", "v000004"]
    assert actor.weights.versions() == [1, 3, 4]
    actor.prune([4])
    assert sorted(path.name for path in folder.iterdir()) == ["v000003", "v000004"]
