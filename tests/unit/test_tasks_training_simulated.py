"""The simulated learner: its time, its versions in the real weight store, its checkpoints, each batch once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from resources.object_store import ObjectStore
from resources.runs import RunRef
from tasks.training.config import TrainingConfig
from tasks.training.owner import LearnerActor
from tasks.training.row import TrainingRow
from tasks.training.simulated import SimulatedLearner
from tasks.training.simulated_config import SimulatedLearnerConfig
from tests.model_directories import write_tokenizer

CONFIG = TrainingConfig(
    backend="simulated",
    simulated=SimulatedLearnerConfig(
        num_parameters=1e9, flops_per_s=1e15, compute_efficiency=0.5, time_scale=10.0, publish_bytes_per_s=1e9
    ),
)


def row(reward: float | None, length: int = 100, version: int = 0, family: str = "lake") -> TrainingRow:
    mask = np.arange(length) >= length // 2
    return TrainingRow(
        token_ids=np.zeros(length, np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        token_versions=np.where(mask, version, -1).astype(np.int32),
        temperature=1.0,
        reward=reward,
        family=family,
        group_id=f"{family}-0",
        rollout_id=f"{family}-{reward}",
        trajectory_id=f"{family}-{reward}",
    )


def test_an_update_takes_the_time_of_its_tokens(tmp_path: Path) -> None:
    waited: list[float] = []
    learner = SimulatedLearner(write_tokenizer(tmp_path), CONFIG, seed=0, wait=waited.append)
    report = learner.update([row(1.0), row(0.0, 400), row(None, family="maze")], 0, max_staleness=1)
    # 600 tokens x 6 x 1e9 parameters at 5e14 FLOP/s, ten times as fast as that.
    assert waited == [pytest.approx(600 * 6e9 / 5e14 / 10)]
    assert (report.version, learner.version, report.metrics["tokens/processed"]) == (1, 1, 600)
    assert report.metrics["reward/lake"] == report.metrics["reward/mean"] == 0.5
    assert "reward/maze" not in report.metrics
    learner.tensors()
    assert waited[1] == pytest.approx(2e9 / 1e9 / 10)
    for wrong in (0, 2):
        with pytest.raises(ValueError, match=f"holds version 1; batch {wrong} is not the next one"):
            learner.update([row(1.0)], wrong)
    assert len(waited) == 2


def test_versions_lie_in_the_weight_store_and_a_resume_goes_on(tmp_path: Path) -> None:
    run = RunRef(run_id="run", store_url=str(ObjectStore.open(str(tmp_path / "store")).url))
    config = TrainingConfig(backend="simulated").model_dump(mode="json")
    arguments = (run.model_dump(), config, str(write_tokenizer(tmp_path / "policy")), 7, 10, 1, 1)
    actor = LearnerActor(*arguments)
    assert actor.group.first is not None
    weights = actor.group.first.weights
    for version in range(3):
        actor.version = actor.group.first.learner.version = version
        actor.publish(version)
    assert weights.prune(1, {1}) == [0]
    assert weights.versions() == [1, 2]
    tensors = [weights.fetch(version)["simulated.version"] for version in (1, 2)]
    assert [int(tensor[0]) for tensor in tensors] == [1, 2]
    assert (weights.directory(2) / "tokenizer.json").is_file()
    resumed = LearnerActor(*arguments, resume_version=2)
    assert resumed.group.first is not None
    assert (resumed.version, resumed.group.first.learner.version) == (2, 2)
    with pytest.raises(ValueError, match="batch 1 is not the next one"):
        resumed.update(1)
    with pytest.raises(ValueError, match="written with seed 7, not 8"):
        LearnerActor(*arguments[:3], 8, *arguments[4:], resume_version=2)


def test_figures_are_refused_for_a_learner_that_ignores_them() -> None:
    with pytest.raises(ValueError, match="training.backend is 'torch', which would ignore it"):
        TrainingConfig(simulated=SimulatedLearnerConfig())
