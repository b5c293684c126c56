"""Metrics of a run: one JSON object an iteration, in the run's folder, appended in order."""

from __future__ import annotations

import math
from typing import Any

from resources.object_store import ObjectStore


def finite(value: Any) -> Any:
    """The same structure with non-finite floats as None, so that every JSON reader accepts it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_metrics(folder: ObjectStore, iteration: int, metrics: dict[str, Any]) -> None:
    """Idempotent: an iteration that is repeated after a crash replaces its own row."""
    folder.put_json(f"metrics/{iteration:06d}.json", finite(metrics))


def read_metrics(folder: ObjectStore) -> list[dict[str, Any]]:
    """All iterations in order."""
    return [folder.get_json(key) for key in folder.list("metrics/")]
