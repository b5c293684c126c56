"""What a scoring request looks like as a row: the files under ``runs/<run>/rewards/queue/requests/``."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from resources.rewards.base import ScoringRequest

REQUEST_SCHEMA_V1 = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("family", pa.string(), nullable=False),
        pa.field("scorer", pa.string(), nullable=False),
        pa.field("scorer_version", pa.string(), nullable=False),
        pa.field("payload", pa.string(), nullable=False),  # JSON object
        pa.field("deadline_s", pa.float64(), nullable=False),
    ],
    metadata={"rollart.schema": "reward_requests", "rollart.schema_version": "1"},
)


def to_table(requests: Sequence[ScoringRequest]) -> pa.Table:
    """One row per request, in order. Raises ValueError naming the trajectory whose payload is not JSON."""
    return pa.Table.from_pydict(
        {
            "trajectory_id": [r.trajectory_id for r in requests],
            "family": [r.family for r in requests],
            "scorer": [r.scorer for r in requests],
            "scorer_version": [r.scorer_version for r in requests],
            "payload": [_payload_json(r) for r in requests],
            "deadline_s": [r.deadline_s for r in requests],
        },
        schema=REQUEST_SCHEMA_V1,
    )


def from_table(table: pa.Table) -> list[ScoringRequest]:
    """Inverse of `to_table`. Raises ValueError when the table has another schema."""
    if not table.schema.equals(REQUEST_SCHEMA_V1):
        raise ValueError(f"reward requests have the columns {table.schema.names}; expected {REQUEST_SCHEMA_V1.names}")
    return [
        ScoringRequest(
            trajectory_id=row["trajectory_id"],
            family=row["family"],
            scorer=row["scorer"],
            scorer_version=row["scorer_version"],
            payload=json.loads(row["payload"]),
            deadline_s=row["deadline_s"],
        )
        for row in table.to_pylist()
    ]


def _payload_json(request: ScoringRequest) -> str:
    try:
        return json.dumps(request.payload, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"judgement of {request.trajectory_id!r} (family {request.family!r}) is not JSON: {error}. "
            "Environment.judgement must return text, numbers, booleans, null, lists and dicts of them only"
        ) from error
