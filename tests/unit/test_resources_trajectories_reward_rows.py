"""Rows of the reward pool: a fixed schema that round-trips scores and failures alike."""

from __future__ import annotations

import pyarrow as pa
import pytest

from resources.failures import FailureClass
from resources.rewards.base import Score
from resources.trajectories.arrow_files import decode_arrow, encode_arrow
from resources.trajectories.reward_rows import REWARD_SCHEMA_V1, from_table, to_table

GOOD = Score("r/f-0/0/0", "unit_tests", "1", 0.8, True, {"outcome": 1.0, "invalid_action": -0.2}, duration_s=0.1)
FAILED = Score("r/f-0/1/0", "unit_tests", "1", None, None, failure=FailureClass.REWARD, failure_message="deadline")


def test_scores_and_failures_round_trip_through_a_file() -> None:
    table = to_table([GOOD, FAILED], families=["f", "g"], replica="replica-1")
    read = decode_arrow(encode_arrow(table))
    assert from_table(read) == [GOOD, FAILED]
    assert read.column("family").to_pylist() == ["f", "g"]
    assert read.column("replica").to_pylist() == ["replica-1", "replica-1"]


@pytest.mark.parametrize("scores", [[], [GOOD], [FAILED]], ids=["empty", "no failure", "no reward"])
def test_the_schema_is_the_same_whatever_the_rows(scores: list[Score]) -> None:
    table = decode_arrow(encode_arrow(to_table(scores, families=["f"] * len(scores), replica="x")))
    assert table.schema.equals(REWARD_SCHEMA_V1, check_metadata=True)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (Score("t", "s", "1", None), "exactly one"),
        (Score("t", "s", "1", 0.0, failure=FailureClass.REWARD), "exactly one"),
        (Score("t", "s", "1", float("nan")), "finite"),
    ],
)
def test_a_score_that_is_neither_reward_nor_failure_is_refused(score: Score, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_table([score], families=["f"], replica="x")


def test_a_cut_file_is_an_error() -> None:
    data = encode_arrow(to_table([GOOD], families=["f"], replica="x"))
    with pytest.raises(pa.ArrowInvalid):
        decode_arrow(data[: len(data) // 2])
