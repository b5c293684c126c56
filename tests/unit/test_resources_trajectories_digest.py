"""A digest is of what was played: equal for another run, attempt or place, different for one bit of it."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from resources.object_store import ObjectStore
from resources.rollout.messages import Batch, BatchGroup, BatchMember
from resources.trajectories.digest import batch_digest, trajectory_digest
from resources.trajectories.store import TrajectoryWriter
from resources.trajectories.trajectory import Trajectory, TrajectoryRef
from tests.trajectory_factory import make_trajectory

ELSEWHERE = {
    "run_id", "trajectory_id", "rollout_id", "attempt", "submitted_at", "started_at", "finished_at", "reset_s",
    "environment_s", "generation_s", "failure_message",
}  # fmt: skip


def other(value):
    if isinstance(value, np.ndarray):
        changed = value.copy()
        if value.dtype == np.float32:
            changed[-1] = np.nextafter(changed[-1], np.float32(9))  # one bit
        else:
            changed[-1] = not changed[-1] if value.dtype == bool else changed[-1] + 1
        return changed
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, dict):
        return {**value, "more": 1.0}
    return value[:-1] if value else "engine"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Trajectory)])
def test_every_field_counts_but_where_and_when(field: str) -> None:
    trajectory = make_trajectory()
    changed = make_trajectory(**{field: other(getattr(trajectory, field))})
    assert (trajectory_digest(changed) == trajectory_digest(trajectory)) == (field in ELSEWHERE)


def test_a_batch_counts_its_order_and_final_rewards_but_not_its_files(tmp_path) -> None:
    store = ObjectStore.open(str(tmp_path))

    async def write(worker: str, members) -> dict[int, TrajectoryRef]:
        writer = TrajectoryWriter(store, "run", worker, seal_bytes=1 << 20, seal_after_s=0.001)
        refs = {member: await writer.write(make_trajectory(member)) for member in members}
        await writer.close()
        return refs

    def digest(refs, members=(0, 1), reward=1.0, counters=None) -> str:
        rows = tuple(
            BatchMember(make_trajectory(m).trajectory_id, refs[m], reward, True, "environment", "1", 12)
            for m in members
        )
        return batch_digest(store, Batch("run", 3, (BatchGroup("g", "calculator", 7, rows),), counters or {}))

    first, second = asyncio.run(write("a", (0, 1))), asyncio.run(write("b", (1, 0)))
    assert first != second and digest(first) == digest(second, counters={"started": 9})
    assert len({digest(first), digest(first, (1, 0)), digest(first, reward=0.5), digest(first, (0,))}) == 4
