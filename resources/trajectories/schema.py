"""How a trajectory lies in a table: schema version 2, fixed and never inferred, and the way there and back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic_core import from_json, to_json

from resources.failures import FailureClass
from resources.trajectories.trajectory import Trajectory, Turn
from resources.trajectories.validation import check_trajectory


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _token_list(name: str, kind: pa.DataType) -> pa.Field:
    return _required(name, pa.large_list(_required("item", kind)))


TURN_V1 = pa.struct(
    [
        _required("observation_start", pa.int32()),
        _required("action_start", pa.int32()),
        _required("action_end", pa.int32()),
        _required("engine", pa.string()),
        _required("hardware_class", pa.string()),
        _required("finish_reason", pa.string()),
        _required("reward", pa.float64()),
        _required("cached_tokens", pa.int32()),
        _required("queue_s", pa.float64()),
        _required("prefill_s", pa.float64()),
        _required("decode_s", pa.float64()),
        _required("environment_s", pa.float64()),
        pa.field("tool_name", pa.string()),
        _required("invalid_action", pa.bool_()),
        pa.field("error", pa.string()),
    ]
)
"""One generation and the environment's answer; positions index the row's token lists."""

SCHEMA_V1 = pa.schema(
    [
        # identity
        _required("run_id", pa.string()),
        _required("trajectory_id", pa.string()),
        _required("rollout_id", pa.string()),
        _required("attempt", pa.int32()),
        _required("family", pa.string()),
        _required("env_id", pa.string()),
        _required("env_version", pa.string()),
        _required("group_id", pa.string()),
        _required("member", pa.int32()),
        _required("group_size", pa.int32()),
        _required("seed_env", pa.int64()),
        _required("seed_sampling", pa.int64()),
        _required("split", pa.string()),
        # sampling
        _required("temperature", pa.float64()),
        _required("top_p", pa.float64()),
        _required("top_k", pa.int32()),
        _required("tokenizer_hash", pa.string()),
        _required("template_hash", pa.string()),
        # tokens: four lists of one length in every row; 64-bit offsets, a file may hold more than 2^31 tokens
        _token_list("token_ids", pa.int32()),
        _token_list("loss_mask", pa.bool_()),
        _token_list("behaviour_logprobs", pa.float32()),
        _token_list("token_versions", pa.int32()),
        _required("prompt_length", pa.int32()),
        _required("turns", pa.list_(_required("item", TURN_V1))),
        # outcome: reward and components are null when the pool judges or nobody could
        pa.field("reward", pa.float64()),
        pa.field("reward_components", pa.string()),  # JSON object of float
        pa.field("success", pa.bool_()),
        _required("termination", pa.string()),
        _required("truncated", pa.bool_()),
        pa.field("failure_class", pa.string()),
        _required("failure_message", pa.string()),
        _required("scorer", pa.string()),
        _required("scorer_version", pa.string()),
        # for people
        _required("messages", pa.string()),  # OpenAI messages as JSON
        _required("final_state", pa.string()),
        # times: Unix seconds, then durations in seconds
        _required("submitted_at", pa.float64()),
        _required("started_at", pa.float64()),
        _required("finished_at", pa.float64()),
        _required("reset_s", pa.float64()),
        _required("environment_s", pa.float64()),
        _required("generation_s", pa.float64()),
    ],
    metadata={"rollart.schema": "trajectories", "rollart.schema_version": "1"},
)

SCHEMA_V2 = SCHEMA_V1.append(pa.field("sequence_starts", pa.list_(_required("item", pa.int32())))).with_metadata(
    {"rollart.schema": "trajectories", "rollart.schema_version": "2"}
)
"""What is written. Version 1, whose rows are one sequence each, is still read; beside it the new column is null."""

_TOKEN_COLUMNS = {
    "token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "behaviour_logprobs": np.dtype(np.float32),
    "token_versions": np.dtype(np.int32),
}


def to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """One row per trajectory, in order, as SCHEMA_V2.

    Raises ValueError naming the field for a row that `check_trajectory` refuses or that does not fit its column.
    """
    for trajectory in trajectories:
        check_trajectory(trajectory)
    columns = []
    for field in SCHEMA_V2:
        try:
            column = _column(trajectories, field)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ValueError(f"trajectory field {field.name}: {error}; allowed is {field.type}") from error
        if column.null_count and not field.nullable:
            raise ValueError(f"trajectory field {field.name} is None; allowed is {field.type}")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=SCHEMA_V2)


def from_table(table: pa.Table) -> list[Trajectory]:
    """The trajectories of a table of SCHEMA_V2 or SCHEMA_V1, in order; their arrays are writable and share the memory
    of one copy.

    Raises ValueError when the table's columns or its schema version are others.
    """
    _check_schema(table.schema)
    table = table.combine_chunks()
    values: dict[str, Sequence[Any]] = {}
    for field in SCHEMA_V1:
        column = _only_chunk(table.column(field.name))
        if field.name in _TOKEN_COLUMNS:
            values[field.name] = _token_arrays(column, _TOKEN_COLUMNS[field.name])
        elif field.name == "turns":
            values[field.name] = _read_turns(column)
        else:
            values[field.name] = column.to_pylist()
    values["reward_components"] = [{} if text is None else from_json(text) for text in values["reward_components"]]
    values["messages"] = [from_json(text) for text in values["messages"]]
    is_first_version = table.schema.get_field_index("sequence_starts") < 0
    starts = [None] * table.num_rows if is_first_version else table.column("sequence_starts").to_pylist()
    values["sequence_starts"] = [each or [] for each in starts]
    values["failure_class"] = [None if name is None else FailureClass(name) for name in values["failure_class"]]
    # By position: three times as fast as by name, and a dataclass lists its fields in order.
    return list(map(Trajectory, *(values[field.name] for field in dataclasses.fields(Trajectory))))


def _column(trajectories: Sequence[Trajectory], field: pa.Field) -> pa.Array:
    name = field.name
    if name in _TOKEN_COLUMNS:
        rows = [np.asarray(getattr(t, name)).astype(_TOKEN_COLUMNS[name], copy=False) for t in trajectories]
        flat = np.concatenate(rows) if rows else np.empty(0, _TOKEN_COLUMNS[name])
        return pa.LargeListArray.from_arrays(_offsets(rows, np.int64), pa.array(flat), type=field.type)
    if name == "turns":
        return _turns_column([t.turns for t in trajectories])
    if name == "messages":
        return pa.array([to_json(t.messages).decode() for t in trajectories], field.type)
    if name == "reward_components":
        return pa.array([_components(t) for t in trajectories], field.type)
    return pa.array([getattr(t, name) for t in trajectories], field.type)


def _turns_column(rows: Sequence[list[Turn]]) -> pa.Array:
    turns = list(itertools.chain.from_iterable(rows))
    parts = [pa.array([getattr(turn, field.name) for turn in turns], field.type) for field in TURN_V1]
    flat = pa.StructArray.from_arrays(parts, fields=list(TURN_V1))
    return pa.ListArray.from_arrays(_offsets(rows, np.int32), flat, type=SCHEMA_V1.field("turns").type)


def _offsets(rows: Sequence[Any], kind: type[np.signedinteger]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=kind)]).astype(kind))


def _components(trajectory: Trajectory) -> str | None:
    if trajectory.reward is None and not trajectory.reward_components:
        return None
    return to_json(trajectory.reward_components).decode()


def _only_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _token_arrays(column: pa.Array, kind: np.dtype) -> list[np.ndarray]:
    flat = column.values.to_numpy(zero_copy_only=False).astype(kind)
    return [flat[start:end] for start, end in itertools.pairwise(column.offsets.to_numpy())]


def _read_turns(column: pa.Array) -> list[list[Turn]]:
    offsets = column.offsets.to_numpy()
    flat = column.values
    parts = [flat.field(position).to_pylist() for position in range(flat.type.num_fields)]
    turns = [Turn(*values) for values in zip(*parts, strict=True)]
    return [turns[start:end] for start, end in itertools.pairwise(offsets)]


def _check_schema(schema: pa.Schema) -> None:
    if schema.equals(SCHEMA_V2) or schema.equals(SCHEMA_V1):
        return
    version = (schema.metadata or {}).get(b"rollart.schema_version", b"unknown").decode()
    wrong = [field.name for field in SCHEMA_V2 if schema.get_field_index(field.name) < 0]
    wrong += [field.name for field in schema if field not in list(SCHEMA_V2)]
    raise ValueError(
        f"trajectory table has schema version {version} and differs from version 2 in the columns {wrong}; "
        "read it with the release that wrote it"
    )


assert [field.name for field in dataclasses.fields(Turn)] == TURN_V1.names, "read by position"
