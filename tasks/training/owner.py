"""The learner's owner: one actor on the learner class that holds weights and optimizer between iterations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from resources.runs import RunRef, checkpoint_prefix
from resources.trajectories.batch import read_batch
from resources.trajectories.store import read_trajectories
from resources.weights.store import WeightStore
from tasks.training.config import TrainingConfig
from tasks.training.pool_components import PoolComponents
from tasks.training.rows import generation_seconds, training_rows

if TYPE_CHECKING:
    from tasks.training.learner import Learner
    from tasks.training.simulated import SimulatedLearner


class LearnerActor:
    """Synchronous methods: they run one at a time, on the actor thread of the Dask worker that hosts it."""

    def __init__(
        self,
        run: dict[str, Any],
        config: dict[str, Any],
        model_directory: str,
        seed: int,
        num_updates: int,
        num_families: int,
        max_staleness: int,
        device: str = "cpu",
        threads: int = 1,
        resume_version: int | None = None,
    ) -> None:
        self.run = RunRef.model_validate(run)
        self.folder = self.run.folder()
        self.weights = WeightStore(self.run.root(), self.run.run_id)
        self.num_families = num_families
        self.max_staleness = max_staleness
        self.learner = build_learner(
            model_directory,
            TrainingConfig.model_validate(config),
            seed=seed,
            device=device,
            threads=threads,
            total_updates=num_updates,
        )
        needs_components = self.learner.needs_components
        self._pool_components = PoolComponents(self.folder) if needs_components else None
        self.version = 0
        if resume_version is not None:
            self.learner.restore(self.folder, checkpoint_prefix(resume_version))
            self.version = resume_version

    def update(self, version: int) -> dict[str, Any]:
        """Train on batch ``version``; the learner then holds version + 1. Returns the update's metrics.

        A repeated call for a batch that is already trained is refused: a batch is trained exactly once.
        """
        if version != self.version:
            raise ValueError(
                f"the learner holds version {self.version}; batch {version} is not the next one to train on"
            )
        started = time.perf_counter()
        batch = read_batch(self.run.root(), self.run.run_id, version)
        members = [member for group in batch.groups for member in group.members]
        trajectories = read_trajectories(self.run.root(), [member.ref for member in members])
        components = None if self._pool_components is None else self._pool_components.of_batch(batch)
        rows = training_rows(batch, trajectories, components)
        read_s = time.perf_counter() - started
        report = self.learner.update(rows, version, num_families=self.num_families, max_staleness=self.max_staleness)
        self.version = version + 1
        return {
            **report.metrics,
            **generation_seconds(trajectories),
            "time/read_batch_s": read_s,
            "time/update_s": time.perf_counter() - started,
        }

    def publish(self, version: int) -> dict[str, Any]:
        """Write the weights of a version, then the checkpoint that a resume starts from.

        What lies there already is replaced: it comes from an iteration that ended before it was recorded. A learner
        that was rebuilt after the update and holds the version before trains on its batch again, bitwise as before.
        """
        if self.version == version - 1:
            self.update(version - 1)
        if self.version != version:
            raise ValueError(f"the learner holds version {self.version} and cannot publish version {version}")
        started = time.perf_counter()
        manifest = self.weights.publish(
            self.version, self.learner.tensors(), files=self.learner.files(), on_exist="replace"
        )
        published_s = time.perf_counter() - started
        self.learner.save(self.folder, checkpoint_prefix(self.version))
        return {
            "version": self.version,
            "num_bytes": manifest.num_bytes,
            "publish_s": published_s,
            "checkpoint_s": time.perf_counter() - started - published_s,
        }


def build_learner(
    model_directory: str, config: TrainingConfig, *, seed: int, device: str, threads: int, total_updates: int
) -> Learner | SimulatedLearner:
    """The learner that ``config.backend`` names. Heavy imports happen here, in the learner's worker."""
    if config.backend == "simulated":
        from tasks.training.simulated import SimulatedLearner

        return SimulatedLearner(model_directory, config, seed=seed)
    from tasks.training.learner import Learner

    return Learner(model_directory, config, seed=seed, device=device, threads=threads, total_updates=total_updates)
