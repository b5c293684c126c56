"""The learner's owner: one actor on the learner class that holds weights and optimizer between iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resources.rollout.messages import BatchGroup
from tasks.training.rank import LearnerSettings
from tasks.training.rank_group import RankGroup


class LearnerActor:
    """Synchronous methods: they run one at a time, on the actor thread of the Dask worker that hosts it.

    With ``hardware_class`` the learner has a rank on each worker of that class (`training.ranks`): this actor holds the
    first one, and builds the others. When a rank is lost, what was asked fails with the rank's name, and the next call
    goes on from the last checkpoint with a new group.
    """

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
        hardware_class: str | None = None,
        num_ranks: int | None = None,
    ) -> None:
        """``num_ranks``: of the learner whose place this one takes; None: it is the run's first."""
        settings = LearnerSettings(
            run, config, model_directory, seed, num_updates, num_families, max_staleness, device, threads
        )
        self.group = RankGroup(settings, hardware_class, num_ranks)
        self.group.build(resume_version)
        self.version = resume_version or 0
        self._saved = resume_version
        """Version of the newest checkpoint that this learner knows; None: the model directory is."""

    def update(self, version: int) -> dict[str, Any]:
        """Train on batch ``version``; the learner then holds version + 1. Returns the update's metrics.

        A repeated call for a batch that is already trained is refused: a batch is trained exactly once.
        """
        self._rebuild_if_broken()
        self._check_next(version)
        metrics = self.group.together("update", version)
        self.version = version + 1
        return metrics

    def stream(self, version: int, groups: Sequence[BatchGroup]) -> None:
        """Begin, or go on with, the update on batch ``version`` while it fills (`training.streamed`): groups that it is
        sure to hold. The weights stay as they are until `update` finds the whole batch."""
        self._rebuild_if_broken()
        self._check_next(version)
        self.group.together("stream", version, groups)

    def publish(self, version: int) -> dict[str, Any]:
        """Write the weights of a version, then the checkpoint that a resume starts from.

        What lies there already is replaced: it comes from an iteration that ended before it was recorded. A learner, or
        a group of ranks, that was rebuilt after the update and holds the version before trains on its batch again,
        bitwise as before.
        """
        self._rebuild_if_broken()
        if self.version == version - 1:
            self.update(version - 1)
        if self.version != version:
            raise ValueError(f"the learner holds version {self.version} and cannot publish version {version}")
        # One after the other: the first rank writes a version while nobody waits for it in a collective.
        report = self.group.together("write_version", version) | self.group.together("write_checkpoint", version)
        self._saved = version
        return report

    def close(self) -> None:
        """End all ranks."""
        self.group.close()

    def _check_next(self, version: int) -> None:
        if version != self.version:
            raise ValueError(
                f"the learner holds version {self.version}; batch {version} is not the next one to train on"
            )

    def _rebuild_if_broken(self) -> None:
        if self.group.broken is not None:
            self.group.build(self._saved)
            self.version = self._saved or 0
