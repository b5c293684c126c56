"""One rank of the learner: the learner of one process, with the batches it trains on and the stores it writes to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resources.rollout.messages import Batch, BatchGroup
from resources.runs import RunRef, checkpoint_prefix
from resources.trajectories.batch import read_batch
from resources.trajectories.store import read_trajectories
from resources.trajectories.trajectory import Trajectory
from resources.weights.store import WeightStore
from tasks.training.config import TrainingConfig
from tasks.training.pool_components import PoolComponents
from tasks.training.row import TrainingRow
from tasks.training.rows import generation_seconds, training_rows

if TYPE_CHECKING:
    from tasks.training.learner import Learner
    from tasks.training.ranks import Ranks
    from tasks.training.simulated import SimulatedLearner


@dataclass(frozen=True, slots=True)
class EarlyGroup:
    """A group that was read before its batch was complete."""

    group: BatchGroup
    trajectories: list[Trajectory]
    rows: list[TrainingRow]


def early_groups(
    groups: Sequence[BatchGroup], trajectories: Sequence[Trajectory], rows: Sequence[TrainingRow]
) -> dict[str, EarlyGroup]:
    """By group id: each group with what was read of it. A member has one trajectory, and one row or several."""
    rest = iter(trajectories)
    return {
        group.group_id: EarlyGroup(
            group,
            list(islice(rest, len(group.members))),
            [row for row in rows if row.group_id == group.group_id],
        )
        for group in groups
    }


@dataclass(frozen=True)
class LearnerSettings:
    """What every rank of a run's learner is built with. Picklable."""

    run: dict[str, Any]
    config: dict[str, Any]
    """Of `TrainingConfig`."""
    model_directory: str
    seed: int
    num_updates: int
    num_families: int
    max_staleness: int
    device: str = "cpu"
    threads: int = 1

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig.model_validate(self.config)


class LearnerRank:
    """Every rank calls the same methods with the same arguments; the first one writes and reports."""

    def __init__(self, settings: LearnerSettings, ranks: Ranks | None, version: int | None) -> None:
        """``version``: of the checkpoint to start from; None: from the model directory."""
        self.settings = settings
        self.run = RunRef.model_validate(settings.run)
        self.folder = self.run.folder()
        self.weights = WeightStore(self.run.root(), self.run.run_id)
        self.is_first, self.size = (ranks is None or ranks.rank == 0), (1 if ranks is None else ranks.size)
        self.learner = build_learner(
            settings.model_directory,
            settings.training,
            seed=settings.seed,
            device=settings.device,
            threads=settings.threads,
            total_updates=settings.num_updates,
            ranks=ranks,
        )
        self._pool_components = PoolComponents(self.folder) if self.learner.needs_components else None
        self._tokenizer_hash = read_tokenizer_hash(settings)
        self._early: dict[str, EarlyGroup] = {}
        """Groups of the next batch that were streamed."""
        if version is not None:
            self.learner.restore(self.folder, checkpoint_prefix(version))

    def update(self, version: int) -> dict[str, Any]:
        """Train on batch ``version``; returns the update's metrics."""
        started = time.perf_counter()
        batch = read_batch(self.run.root(), self.run.run_id, version)
        trajectories, rows = self._read(batch)
        self._early = {}
        read_s = time.perf_counter() - started
        report = self.learner.update(
            rows, version, num_families=self.settings.num_families, max_staleness=self.settings.max_staleness
        )
        return {
            **report.metrics,
            **generation_seconds(trajectories),
            "num_ranks": self.size,
            "time/read_batch_s": read_s,
            "time/update_s": time.perf_counter() - started,
        }

    def stream(self, version: int, groups: Sequence[BatchGroup]) -> None:
        """Begin, or go on with, the update on batch ``version``: groups that it will hold. No weight changes, and what
        `update` finds in the manifest decides what is trained."""
        from tasks.training.learner import Learner

        assert isinstance(self.learner, Learner), "the configuration refuses to stream without gradients"
        trajectories, rows = self._read(Batch(self.run.run_id, version, tuple(groups)))
        self.learner.stream(rows, version, max_staleness=self.settings.max_staleness)
        self._early |= early_groups(groups, trajectories, rows)

    def _read(self, batch: Batch) -> tuple[list[Trajectory], list[TrainingRow]]:
        """Trajectories and rows of a batch, in its order; those that were streamed are not read again."""
        part = replace(batch, groups=tuple(g for g in batch.groups if not self._is_read(g))) if self._early else batch
        members = [member for group in part.groups for member in group.members]
        trajectories = read_trajectories(self.run.root(), [member.ref for member in members])
        components = None if self._pool_components is None else self._pool_components.of_batch(part)
        rows = training_rows(part, trajectories, components, self._tokenizer_hash)
        if part is batch:
            return trajectories, rows
        known = self._early | early_groups(part.groups, trajectories, rows)
        in_order = [known[group.group_id] for group in batch.groups]
        trajectories = [trajectory for group in in_order for trajectory in group.trajectories]
        return trajectories, [row for group in in_order for row in group.rows]

    def _is_read(self, group: BatchGroup) -> bool:
        return group.group_id in self._early and self._early[group.group_id].group == group

    def write_version(self, version: int) -> dict[str, Any]:
        """Publish the weights held as this version.

        What lies there already is replaced: it comes from an iteration that ended before it was recorded. The first
        rank writes when all have gathered; the others do not wait for it, least of all in a collective, which has a
        timeout that a large policy and a slow store outlast.
        """
        started = time.perf_counter()
        tensors = self.learner.tensors()
        num_bytes = 0
        if self.is_first:
            adapter, base = self.learner.adapter, None
            if adapter is not None:
                base = self.weights.publish_base(self.settings.model_directory, adapter.base_digest)
            files = self.learner.files(base)
            num_bytes = self.weights.publish(
                version, tensors, files=files, adapter=adapter, on_exist="replace"
            ).num_bytes
        return {"version": version, "num_bytes": num_bytes, "publish_s": time.perf_counter() - started}

    def write_checkpoint(self, version: int) -> dict[str, Any]:
        """Write the checkpoint that a resume starts from. Waiting and replacing as in `write_version`."""
        started = time.perf_counter()
        self.learner.save(self.folder, checkpoint_prefix(version))
        return {"checkpoint_s": time.perf_counter() - started}


def read_tokenizer_hash(settings: LearnerSettings) -> str | None:
    """Of the policy that is trained. None where there is none to compare with: nothing is computed from the ids
    (``backend: simulated``), or the directory holds weights alone."""
    directory = Path(settings.model_directory)
    if settings.training.backend == "simulated" or not (directory / "tokenizer_config.json").is_file():
        return None
    from resources.policy.chat_format import ChatFormat

    return ChatFormat.from_directory(directory).tokenizer_hash


def build_learner(
    model_directory: str,
    config: TrainingConfig,
    *,
    seed: int,
    device: str,
    threads: int,
    total_updates: int,
    ranks: Ranks | None = None,
) -> Learner | SimulatedLearner:
    """The learner that ``config.backend`` names. Heavy imports happen here, in the learner's worker."""
    if config.backend == "simulated":
        from tasks.training.simulated import SimulatedLearner

        return SimulatedLearner(model_directory, config, seed=seed)
    from tasks.training.learner import Learner

    return Learner(
        model_directory, config, seed=seed, device=device, threads=threads, total_updates=total_updates, ranks=ranks
    )
