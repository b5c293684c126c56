"""Which reward a trajectory got in the end: its row joined with the pool's verdict on (trajectory, scorer, version)."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset as ds

from resources.object_store import ObjectStore
from resources.trajectories.reward_rows import REWARD_SCHEMA_V1
from resources.trajectories.store import arrow_dataset, run_dataset

KEY = ("trajectory_id", "scorer", "scorer_version")
FINAL_COLUMNS = ("final_reward", "final_success", "final_components", "final_failure")

REWARDED_SQL = """
select t.*,
       coalesce(t.reward, r.reward) as final_reward,
       coalesce(t.success, r.success) as final_success,
       coalesce(t.reward_components, r.components) as final_components,
       coalesce(t.failure_class, r.failure) as final_failure
from trajectories t
left join rewards r
  on r.trajectory_id = t.trajectory_id and r.scorer = t.scorer and r.scorer_version = t.scorer_version
""".strip()
"""`rewarded_trajectories` for DuckDB and Polars SQL, over `run_dataset` (or its table) and `rewards_table`."""


def rewards_folder(run_id: str) -> str:
    """Folder of the reward pool's result files, under the root of the store."""
    return f"runs/{run_id}/rewards/results"


def rewards_dataset(store: ObjectStore, run_id: str) -> ds.Dataset:
    """All rows that reward replicas have written until now, as REWARD_SCHEMA_V1; a key may appear twice."""
    return arrow_dataset(store, rewards_folder(run_id), REWARD_SCHEMA_V1)


def rewards_table(store: ObjectStore, run_id: str) -> pa.Table:
    """One row per (trajectory, scorer, version): the first one of each key, by file name and row (S26)."""
    table = rewards_dataset(store, run_id).to_table()
    keys = _keys(table)
    numbered = pa.table({"key": keys, "row": pa.array(range(table.num_rows), pa.int64())})
    first = numbered.group_by("key", use_threads=False).aggregate([("row", "min")]).column("row_min")
    return table.take(first.combine_chunks().sort())


def rewarded_trajectories(store: ObjectStore, run_id: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Every trajectory of the run with FINAL_COLUMNS: inline values where the row has them, else the pool's.

    ``columns`` names the trajectory columns to keep (None: all). ``final_reward`` is null as long as nobody has scored
    the row, and for ever when it is unscored (``final_failure`` then says whose failure that was).
    """
    inline = {"reward", "success", "reward_components", "failure_class"}
    dataset = run_dataset(store, run_id)
    kept = dataset.schema.names if columns is None else list(columns)
    trajectories = dataset.to_table(columns=sorted({*kept, *KEY, *inline}))
    rewards = rewards_table(store, run_id)
    # An index and a take, and no pa.Table.join: that one refuses tables with list columns.
    options = pyarrow.compute.SetLookupOptions(value_set=_keys(rewards).combine_chunks())
    match = pyarrow.compute.call_function("index_in", [_keys(trajectories)], options)
    pairs = zip(
        FINAL_COLUMNS,
        ("reward", "success", "reward_components", "failure_class"),
        ("reward", "success", "components", "failure"),
        strict=True,
    )
    result = trajectories.select(kept)
    for name, own, pool in pairs:
        columns_of_two = [trajectories.column(own), rewards.column(pool).take(match)]
        final = pyarrow.compute.call_function("coalesce", columns_of_two)
        result = result.append_column(name, final)
    return result


def _keys(table: pa.Table) -> pa.ChunkedArray:
    columns = [table.column(name) for name in KEY]
    return pyarrow.compute.call_function("binary_join_element_wise", [*columns, pa.scalar("\x1f")])
