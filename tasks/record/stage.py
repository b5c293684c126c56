"""Stage 7, record: metrics, artifacts and, last, the iteration's manifest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact

from resources.failures import InfrastructureFailure
from resources.pools.actors import call_sync
from resources.pools.registry import lookup_sync
from resources.recovery.whole import RESTARTS
from resources.runs import RunRef, checkpoint_prefix, prune_checkpoints, write_iteration
from resources.telemetry.metrics import finite, write_metrics
from resources.weights.store import WeightStore
from tasks.record.table import family_table

ANSWER_S = 60.0
REBUILT = {"engine": "restarts/engine", "learner": "restarts/learner", "environment": "restarts/environment"}
"""Metric of each role whose actors are rebuilt."""


def worker_stats(workers: Sequence[Any], warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """What each rollout worker counts. One that is gone has nothing to say: the others play on, and so does the run."""
    stats = []
    for worker in workers:
        try:
            stats.append(call_sync(worker, "stats", timeout_s=ANSWER_S))
        except InfrastructureFailure as failure:
            warn(f"no figures of a rollout worker: {failure}")
    return stats


@task(name="record", tags=["pool:control"])
def record(
    run: RunRef, version: int, metrics: dict[str, Any], families: list[str], checkpoint_keep: int
) -> dict[str, Any]:
    """Write what iteration ``version`` measured. Returns the metrics row.

    The manifest moves last: once it lies there, a resume starts behind this iteration. Then weight versions and
    checkpoints beyond the newest ``checkpoint_keep`` are dropped; version ``version + 1`` stays, as a resume needs it.
    """
    actors = lookup_sync(run.service_id, max_age_s=0.0)
    stats = call_sync(actors.queue, "stats", timeout_s=ANSWER_S)
    logger = get_run_logger()
    workers = worker_stats(actors.rollout_workers, logger.warning)
    # Actors have no flow run to log to: they keep bounded records, which are logged here.
    for line in stats.pop("log_records", []):
        logger.warning("%s", line)
    row = {"iteration": version, "recorded_at": time.time(), **metrics, "queue": stats, "workers": workers}
    row |= {metric: actors.facts.get(RESTARTS, {}).get(role, 0) for role, metric in REBUILT.items()}
    for family in families:
        breaker = stats["breakers"].get(family, {"num_openings": 0, "failures_in_a_row": 0})
        row[f"breaker_openings/{family}"] = breaker["num_openings"]
        row[f"failures_in_a_row/{family}"] = breaker["failures_in_a_row"]
    row["tokens_per_s"] = row["num_tokens"] / row["time/iteration_s"]
    write_metrics(run.folder(), version, row)
    try:
        create_table_artifact(
            key=f"families-{run.run_id}",
            table=family_table(row, families),
            description=f"Iteration {version} by task family",
        )
    except httpx.TransportError as error:  # a table for people: the manifest must not wait for the server
        logger.warning("the table of iteration %d is not shown, the Prefect server does not answer: %s", version, error)
    write_iteration(
        run,
        version,
        {
            "version": version + 1,
            "batch": f"batches/{version:06d}.json",
            "checkpoint": checkpoint_prefix(version + 1),
            "queue_state": finite(call_sync(actors.queue, "snapshot", timeout_s=ANSWER_S)),
        },
    )
    # Not by the learner: it may be at the next update already.
    WeightStore(run.root(), run.run_id).prune(checkpoint_keep, {version + 1})
    prune_checkpoints(run, checkpoint_keep, {version + 1})
    return row
