"""Reward components of the pool's scores: read once, by the scorer that the manifest names."""

from __future__ import annotations

from pathlib import Path

from resources.object_store import ObjectStore
from resources.rewards.base import Score
from resources.rewards.queue import RESULTS
from resources.rollout.messages import Batch, BatchGroup, BatchMember
from resources.trajectories import reward_rows
from resources.trajectories.arrow_files import encode_arrow
from resources.trajectories.trajectory import TrajectoryRef
from tasks.training.pool_components import PoolComponents
from tasks.training.rows import training_rows
from tests.trajectory_factory import make_trajectory


def member(name: str, scorer: str = "exact_answer") -> BatchMember:
    return BatchMember(name, TrajectoryRef("file", 0), 0.9, True, scorer, "1", 0)


def batch_of(*members: BatchMember) -> Batch:
    return Batch("run", 0, (BatchGroup("calculator-0", "calculator", 0, members),))


def write_result(store: ObjectStore, name: str, *scores: Score) -> None:
    table = reward_rows.to_table(scores, families=["calculator"] * len(scores), replica="r")
    store.put(f"{RESULTS}/{name}.arrow", encode_arrow(table))


def score(trajectory_id: str, outcome: float, scorer: str = "exact_answer") -> Score:
    return Score(trajectory_id, scorer, "1", outcome, components={"outcome": outcome})


def test_components_are_those_of_the_scorer_that_the_manifest_names(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    write_result(store, "a", score("t1", 1.0), score("t1", 0.5, scorer="other"), score("t2", 0.0))
    write_result(store, "b", score("t1", 0.25))  # a late duplicate
    pool = PoolComponents(store)
    assert pool.of_batch(batch_of(member("t1"), member("inline", scorer="environment"))) == {"t1": {"outcome": 1.0}}
    write_result(store, "c", score("t3", 1.0))
    assert pool.of_batch(batch_of(member("t2"), member("t3"))) == {"t2": {"outcome": 0.0}, "t3": {"outcome": 1.0}}


def test_rows_carry_the_pools_components_or_their_own_and_the_turns() -> None:
    trajectory = make_trajectory()
    batch = batch_of(member(trajectory.trajectory_id))
    (own,) = training_rows(batch, [trajectory])
    (judged,) = training_rows(batch, [trajectory], {trajectory.trajectory_id: {"outcome": 1.0}})
    assert dict(own.reward_components) == trajectory.reward_components
    assert dict(judged.reward_components) == {"outcome": 1.0}
    assert [(turn.action_start, turn.action_end, turn.reward) for turn in own.turns] == [
        (turn.action_start, turn.action_end, turn.reward) for turn in trajectory.turns
    ]
    own.validate(version=int(own.token_versions.max()), vocabulary_size=int(own.token_ids.max()) + 1)
