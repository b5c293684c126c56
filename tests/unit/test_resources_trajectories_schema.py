"""The trajectory schema: nothing inferred, nothing lost, nothing wrong let in."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from resources.failures import FailureClass
from resources.trajectories.arrow_files import decode_arrow, encode_arrow
from resources.trajectories.schema import SCHEMA_V1, SCHEMA_V2, from_table, to_table
from resources.trajectories.trajectory import Trajectory, Turn
from tests.trajectory_factory import assert_same, make_trajectory


def test_the_schema_holds_every_field_of_a_trajectory() -> None:
    assert set(SCHEMA_V2.names) == {field.name for field in dataclasses.fields(Trajectory)}
    lists = ("token_ids", "loss_mask", "behaviour_logprobs", "token_versions")
    assert all(pa.types.is_large_list(SCHEMA_V2.field(name).type) for name in lists)
    assert SCHEMA_V2.metadata[b"rollart.schema_version"] == b"2"


def test_rows_round_trip_through_a_file() -> None:
    failed = make_trajectory(
        1,
        reward=None,
        reward_components={},
        success=None,
        termination="env_error",
        failure_class=FailureClass.ENVIRONMENT,
        failure_message="step missed its deadline",
    )
    before = [make_trajectory(0), failed, make_trajectory(2, num_tokens=6)]
    table = decode_arrow(encode_arrow(to_table(before)))
    table.validate(full=True)
    assert table.schema.equals(SCHEMA_V2, check_metadata=True)
    for left, right in zip(from_table(table), before, strict=True):
        assert_same(left, right)
    assert table.column("reward_components").to_pylist()[1] is None
    assert json.loads(table.column("messages")[0].as_py())[1]["content"] == 'é "42"\n'


def test_rows_of_a_slice_and_of_several_chunks_are_the_right_ones() -> None:
    table = to_table([make_trajectory(member) for member in range(4)])
    assert [t.member for t in from_table(table.slice(1, 2))] == [1, 2]
    assert_same(from_table(table.slice(2, 1))[0], make_trajectory(2))
    several = pa.concat_tables([table.slice(2), table.slice(0, 1)])
    assert [t.token_ids[0] for t in from_table(several)] == [2000, 3000, 0]
    assert_same(from_table(table.take([3]))[0], make_trajectory(3))


def test_arrays_that_are_read_can_be_written_and_belong_to_one_row() -> None:
    first, second = from_table(decode_arrow(encode_arrow(to_table([make_trajectory(0), make_trajectory(1)]))))
    first.token_ids[:] = -5
    first.loss_mask[:] = True
    assert_same(second, make_trajectory(1))


def test_no_rows_are_a_table_of_the_schema() -> None:
    table = decode_arrow(encode_arrow(to_table([])))
    assert table.schema.equals(SCHEMA_V2, check_metadata=True)
    assert from_table(table) == []


def test_a_batch_of_null_errors_and_one_of_strings_are_of_one_schema() -> None:
    """A column that is all null in the first file keeps its type, also inside the turns."""
    quiet = make_trajectory(0, success=None, reward=None, reward_components={})
    for turn in quiet.turns:
        turn.tool_name = None
    loud = make_trajectory(1, failure_class=FailureClass.POLICY, failure_message="malformed")
    loud.turns[0].error = "tool raised"
    files = [decode_arrow(encode_arrow(to_table([trajectory]))) for trajectory in (quiet, loud)]
    assert files[0].schema.equals(files[1].schema)
    both = from_table(pa.concat_tables(files))
    assert [t.turns[0].error for t in both] == [None, "tool raised"]
    assert [t.failure_class for t in both] == [None, FailureClass.POLICY]


def test_wider_types_are_stored_as_the_schema_says() -> None:
    wide = make_trajectory()
    wide.token_ids = wide.token_ids.astype(np.int64)
    wide.behaviour_logprobs = wide.behaviour_logprobs.astype(np.float64)
    assert_same(from_table(to_table([wide]))[0], make_trajectory())


def test_a_row_without_any_token_is_kept() -> None:
    """M23: nothing sampled, nothing even prompted; the row records it."""
    nothing = make_trajectory(
        token_ids=np.empty(0, np.int32),
        loss_mask=np.empty(0, bool),
        behaviour_logprobs=np.empty(0, np.float32),
        token_versions=np.empty(0, np.int32),
        prompt_length=0,
        turns=[],
        truncated=True,
        reward=None,
        reward_components={},
    )
    read = from_table(to_table([nothing, make_trajectory(1)]))
    assert_same(read[0], nothing)
    assert_same(read[1], make_trajectory(1))
    assert read[0].oldest_version is None


def _with(name: str, at: int, value: Any) -> dict[str, Any]:
    array = getattr(make_trajectory(), name).copy()
    array[at] = value
    return {name: array}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # M15: 3 log-probabilities stored, 4 ids after re-encoding
        ({"behaviour_logprobs": np.zeros(9, np.float32)}, r"token_ids': 10.*behaviour_logprobs': 9.*never pad"),
        ({"loss_mask": np.zeros(10, np.int8)}, "loss_mask has shape .* int8"),
        ({"token_ids": np.zeros((2, 5), np.int32)}, r"token_ids has shape \(2, 5\)"),
        ({"prompt_length": 11}, "prompt_length is 11; allowed are 0 to 10"),
        ({"prompt_length": 4}, r"loss_mask\[3\] is True .*false within the prompt"),
        (_with("token_ids", 2, -1), r"token_ids\[2\] is -1"),
        (_with("behaviour_logprobs", 4, np.nan), r"behaviour_logprobs\[4\] is nan \(1 such\); allowed: finite"),
        (_with("behaviour_logprobs", 4, -np.inf), "finite"),
        (_with("behaviour_logprobs", 4, 0.5), "numbers up to 0"),
        (_with("behaviour_logprobs", 5, -0.5), r"behaviour_logprobs\[5\] is -0.5 .*0 where the mask is false"),
        (_with("token_versions", 5, 12), r"token_versions\[5\] is 12 .*-1 where the mask is false"),
        (_with("token_versions", 6, -1), r"token_versions\[6\] is -1 .*0 or more on sampled"),
        ({"turns": []}, "loss_mask is true on 6 tokens; the turns' actions cover 0"),
        ({"turns": [Turn(0, 3, 5), Turn(4, 6, 10)]}, r"turn 1 has .*\(4, 6, 10\); allowed are ascending"),
        ({"turns": [Turn(0, 3, 5), Turn(5, 6, 11)]}, "from 5 to 10"),
        ({"turns": [Turn(0, 3, 5), Turn(5, 5, 9)]}, "turn 1 sampled positions 5 to 9; loss_mask is not true"),
        ({"sequence_starts": [4]}, r"sequence_starts holds 4, .*\[0, 5\].*never within an action"),
        ({"sequence_starts": [5, 5]}, "allowed are ascending positions from 1 to 9"),
        ({"sequence_starts": [10]}, "allowed are ascending positions from 1 to 9"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward_components": {"outcome": float("inf")}}, "reward_components.outcome is inf"),
        ({"reward": 0.0, "failure_class": FailureClass.ENVIRONMENT}, "unscored: reward None"),
        ({"trajectory_id": ""}, "trajectory_id is empty"),
        ({"split": "test"}, "split is 'test'; allowed are 'train' and 'eval'"),
        ({"termination": "done"}, "termination is 'done'; allowed are terminated"),
        ({"seed_sampling": 2**63}, "seed_sampling"),
        ({"env_version": None}, "env_version is None; allowed is string"),
        ({"env_version": 3}, "env_version"),
    ],
)
def test_a_wrong_row_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    """M15, and the invariants of masks, versions and log-probabilities."""
    with pytest.raises(ValueError, match=message):
        to_table([make_trajectory(1), make_trajectory(**overrides)])


def test_a_table_of_another_schema_is_refused() -> None:
    table = to_table([make_trajectory()])
    with pytest.raises(ValueError, match=r"differs from version 2 in the columns \['turns'\]"):
        from_table(table.drop_columns("turns"))
    other = SCHEMA_V2.with_metadata({"rollart.schema_version": "3"}).append(pa.field("new", pa.string()))
    with pytest.raises(ValueError, match=r"schema version 3 .*\['new'\]"):
        from_table(pa.Table.from_pylist([], schema=other))


def test_rows_of_several_sequences_round_trip() -> None:
    before = [make_trajectory(0, sequence_starts=[5]), make_trajectory(1)]
    first, second = from_table(decode_arrow(encode_arrow(to_table(before))))
    assert_same(first, before[0])
    assert first.sequences == [(0, 5), (5, 10)] and second.sequences == [(0, 10)]


def test_rows_of_the_first_version_are_one_sequence_each() -> None:
    old = to_table([make_trajectory(0), make_trajectory(1)]).drop_columns("sequence_starts").cast(SCHEMA_V1)
    assert old.schema.metadata[b"rollart.schema_version"] == b"1"
    for read, written in zip(from_table(decode_arrow(encode_arrow(old))), range(2), strict=True):
        assert_same(read, make_trajectory(written))
