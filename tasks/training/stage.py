"""Stage 2, update: train the learner on the iteration's batch."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task

from resources.pools.actors import call_sync
from resources.pools.registry import lookup_sync
from resources.runs import RunRef


@task(name="update", tags=["pool:learner"])
def update(run: RunRef, version: int, timeout_s: float) -> dict[str, Any]:
    """Train on batch ``version``; returns the update's metrics. What the learner raises is a crash of the stage."""
    learner = lookup_sync(run.service_id, max_age_s=0.0).learner
    assert learner is not None, f"run {run.run_id} has no learner"
    metrics = call_sync(learner, "update", version, timeout_s=timeout_s)
    get_run_logger().info("update %d: %s", version, {k: v for k, v in metrics.items() if k.startswith("time/")})
    return metrics
