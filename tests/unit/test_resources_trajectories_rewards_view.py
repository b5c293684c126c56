"""The final reward of a trajectory: the shipped view in Arrow, in DuckDB and in Polars, on both back ends."""

from __future__ import annotations

from pathlib import Path

import duckdb
import polars
import pytest

from resources.failures import FailureClass
from resources.object_store import ObjectStore
from resources.rewards.base import Score
from resources.trajectories.arrow_files import encode_arrow
from resources.trajectories.reward_rows import REWARD_SCHEMA_V1
from resources.trajectories.reward_rows import to_table as reward_rows
from resources.trajectories.rewards_view import (
    REWARDED_SQL,
    rewarded_trajectories,
    rewards_dataset,
    rewards_folder,
    rewards_table,
)
from resources.trajectories.schema import to_table
from resources.trajectories.store import run_dataset, trajectory_folder
from tests.trajectory_factory import make_trajectory


def _pool_judged(member: int) -> str:
    return make_trajectory(member).trajectory_id


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    """Member 0 is scored inline, 1 by the pool, 2 failed in the pool, 3 waits, 4 failed in its environment."""
    store = ObjectStore.open(store_url)
    judged = {"reward": None, "reward_components": {}, "success": None, "scorer": "unit_tests"}
    failed = judged | {"termination": "env_error", "failure_class": FailureClass.ENVIRONMENT}
    files = {
        "cpu-0": [make_trajectory(0), make_trajectory(1, **judged), make_trajectory(2, **judged)],
        "cpu-1": [make_trajectory(3, **judged), make_trajectory(4, **failed)],
    }
    for name, rows in files.items():
        store.put(f"{trajectory_folder('run')}/{name}.arrow", encode_arrow(to_table(rows)))
    results = {
        "a": [Score(_pool_judged(1), "unit_tests", "1", 0.5, True, {"outcome": 0.5})],
        "b": [
            Score(_pool_judged(1), "unit_tests", "1", 0.7, False, {"late": 0.7}),  # a late duplicate
            Score(_pool_judged(1), "unit_tests", "2", 0.9, True),  # another version of the scorer
            Score(_pool_judged(2), "unit_tests", "1", None, failure=FailureClass.REWARD, failure_message="deadline"),
        ],
    }
    for name, scores in results.items():
        table = reward_rows(scores, families=["calculator"] * len(scores), replica="r")
        store.put(f"{rewards_folder('run')}/{name}.arrow", encode_arrow(table))
    return store


EXPECTED = {
    0: (0.9, True, '{"outcome":1.0,"invalid_action":-0.1}', None),
    1: (0.5, True, '{"outcome": 0.5}', None),
    2: (None, None, "{}", "reward"),
    3: (None, None, None, None),
    4: (None, None, None, "environment"),
}


def test_rewards_keep_the_first_of_each_key(store: ObjectStore) -> None:
    """S26: the late duplicate is ignored, another scorer version is another reward."""
    table = rewards_table(store, "run")
    assert rewards_dataset(store, "run").count_rows() == 4
    assert table.schema.equals(REWARD_SCHEMA_V1)
    rows = zip(table.column("scorer_version").to_pylist(), table.column("reward").to_pylist(), strict=True)
    assert list(rows) == [("1", 0.5), ("2", 0.9), ("1", None)]


def test_the_view_in_arrow(store: ObjectStore) -> None:
    table = rewarded_trajectories(store, "run")
    assert table.num_rows == 5 and table.column("token_ids")[1].as_py()[0] == 1000
    assert _final(table.to_pylist()) == EXPECTED
    narrow = rewarded_trajectories(store, "run", columns=["member"])
    assert narrow.column_names == ["member", "final_reward", "final_success", "final_components", "final_failure"]
    assert _final(narrow.to_pylist()) == EXPECTED


def test_the_view_in_duckdb(store: ObjectStore) -> None:
    dataset = run_dataset(store, "run")
    with duckdb.connect() as connection:
        # DuckDB scans a dataset under the interpreter's lock, which the S3 service of the tests, a thread of this very
        # process, needs to answer: there the table is read first.
        connection.register("trajectories", dataset if store.url.startswith("file:") else dataset.to_table())
        connection.register("rewards", rewards_table(store, "run"))
        rows = connection.sql(f"select * from ({REWARDED_SQL}) order by member").to_arrow_table().to_pylist()
    assert _final(rows) == EXPECTED
    assert list(rows[1]["token_ids"])[:2] == [1000, 1001]


def test_the_view_in_polars(store: ObjectStore) -> None:
    frames = {
        "trajectories": polars.scan_pyarrow_dataset(run_dataset(store, "run")),
        "rewards": polars.from_arrow(rewards_table(store, "run")),
    }
    result = polars.SQLContext(frames).execute(REWARDED_SQL, eager=True)
    assert isinstance(result, polars.DataFrame)
    assert _final(result.to_dicts()) == EXPECTED


def test_polars_reads_the_files_as_they_are(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path)
    for member in (0, 1):
        data = encode_arrow(to_table([make_trajectory(member)]))
        store.put(f"{trajectory_folder('run')}/cpu-{member}.arrow", data)
    frame = polars.scan_ipc(tmp_path / trajectory_folder("run") / "*.arrow").select(
        "member",
        polars.col("token_ids").list.len().alias("num_tokens"),
        polars.col("loss_mask").list.sum().alias("num_sampled"),
        polars.col("turns").list.get(1).struct.field("invalid_action"),
    )
    assert frame.sort("member").collect().rows() == [(0, 10, 6, True), (1, 10, 6, True)]


def test_a_run_without_files_is_an_empty_view(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path)
    assert rewarded_trajectories(store, "absent").num_rows == 0
    assert run_dataset(store, "absent").count_rows() == rewards_table(store, "absent").num_rows == 0


def _final(rows: list[dict[str, object]]) -> dict[object, tuple[object, ...]]:
    names = ("final_reward", "final_success", "final_components", "final_failure")
    return {row["member"]: tuple(row[name] for name in names) for row in rows}
