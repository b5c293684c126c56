"""Reward components of trajectories that the reward pool judged: the manifest names the final reward alone, its parts
lie in the pool's results."""

from __future__ import annotations

from collections.abc import Mapping

from resources.object_store import ObjectStore
from resources.rewards.queue import RESULTS
from resources.rollout.messages import Batch
from resources.trajectories import reward_rows
from resources.trajectories.arrow_files import decode_arrow


class PoolComponents:
    """Reads each result file of a run once. For estimators that ask for components; others never pay for it."""

    def __init__(self, run_folder: ObjectStore) -> None:
        self._folder = run_folder
        self._read: set[str] = set()
        self._components: dict[tuple[str, str, str], dict[str, float]] = {}

    def of_batch(self, batch: Batch) -> Mapping[str, Mapping[str, float]]:
        """Components by trajectory, of the scorer whose reward the manifest names; without those judged inline.

        A trajectory that was submitted twice has the answer that was written first, as everywhere.
        """
        for key in sorted(set(self._folder.list(RESULTS)) - self._read):
            for score in reward_rows.from_table(decode_arrow(self._folder.get(key))):
                self._components.setdefault((score.trajectory_id, score.scorer, score.scorer_version), score.components)
            self._read.add(key)
        found = {}
        for group in batch.groups:
            for member in group.members:
                components = self._components.pop((member.trajectory_id, member.scorer, member.scorer_version), None)
                if components is not None:
                    found[member.trajectory_id] = components
        return found
