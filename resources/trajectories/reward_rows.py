"""What a score from the reward pool looks like as a row: the files under ``runs/<run>/rewards/results/``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pyarrow as pa

from resources.failures import FailureClass
from resources.rewards.base import Score

REWARD_SCHEMA_V1 = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("family", pa.string(), nullable=False),
        pa.field("scorer", pa.string(), nullable=False),
        pa.field("scorer_version", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),  # null exactly when `failure` is not: the trajectory stays unscored
        pa.field("success", pa.bool_()),
        pa.field("components", pa.string(), nullable=False),  # JSON object of float
        pa.field("failure", pa.string()),  # a FailureClass
        pa.field("failure_message", pa.string(), nullable=False),
        pa.field("duration_s", pa.float64(), nullable=False),
        pa.field("replica", pa.string(), nullable=False),
    ],
    metadata={"rollart.schema": "rewards", "rollart.schema_version": "1"},
)
"""Keyed (trajectory_id, scorer, scorer_version)."""


def to_table(scores: Sequence[Score], *, families: Sequence[str], replica: str) -> pa.Table:
    """One row per score, in order. ``families`` is as long as ``scores``; ``replica`` says who judged.

    Raises ValueError for a score that is neither a finite reward nor a failure.
    """
    if len(families) != len(scores):
        raise ValueError(f"families: {len(families)} given for {len(scores)} scores; give one for each")
    for score in scores:
        _check(score)
    columns = {
        "trajectory_id": [s.trajectory_id for s in scores],
        "family": list(families),
        "scorer": [s.scorer for s in scores],
        "scorer_version": [s.scorer_version for s in scores],
        "reward": [s.reward for s in scores],
        "success": [s.success for s in scores],
        "components": [json.dumps(s.components, sort_keys=True) for s in scores],
        "failure": [None if s.failure is None else str(s.failure) for s in scores],
        "failure_message": [s.failure_message for s in scores],
        "duration_s": [s.duration_s for s in scores],
        "replica": [replica] * len(scores),
    }
    return pa.Table.from_pydict(columns, schema=REWARD_SCHEMA_V1)


def from_table(table: pa.Table) -> list[Score]:
    """The scores of a table of `to_table`, in order."""
    return [
        Score(
            trajectory_id=row["trajectory_id"],
            scorer=row["scorer"],
            scorer_version=row["scorer_version"],
            reward=row["reward"],
            success=row["success"],
            components=json.loads(row["components"]),
            failure=None if row["failure"] is None else FailureClass(row["failure"]),
            failure_message=row["failure_message"],
            duration_s=row["duration_s"],
        )
        for row in table.to_pylist()
    ]


def _check(score: Score) -> None:
    where = f"score of {score.trajectory_id!r} by {score.scorer!r} {score.scorer_version!r}"
    if (score.reward is None) != (score.failure is not None):
        raise ValueError(f"{where}: reward is {score.reward} and failure is {score.failure}; give exactly one of them")
    if score.reward is not None and not math.isfinite(score.reward):
        raise ValueError(f"{where}: reward is {score.reward}; give a finite number, or a failure")
