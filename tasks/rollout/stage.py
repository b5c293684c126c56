"""Stage 1, collect: wait until the group queue holds the iteration's batch, and write its manifest."""

from __future__ import annotations

import time
from typing import Any

from prefect import get_run_logger, task

from resources.pools.actors import call_sync
from resources.pools.registry import lookup_sync
from resources.rollout.log_forwarding import forwarded_log
from resources.rollout.messages import Batch
from resources.runs import RunRef
from resources.trajectories.batch import write_batch
from tasks.rollout.batch_metrics import batch_metrics

GRACE_S = 30.0
"""The queue answers within the stage's timeout; this much more is granted to the call itself."""


@task(name="collect", tags=["pool:control"])
def collect(run: RunRef, version: int, timeout_s: float) -> dict[str, Any]:
    """Batch ``version``: complete, scored groups within the staleness bound. Returns its metrics.

    Raises DeadlineExceeded after ``timeout_s`` seconds, naming what is missing.
    """
    started = time.perf_counter()
    queue = lookup_sync(run.service_id).queue
    with forwarded_log(queue, get_run_logger().warning):
        batch: Batch = call_sync(queue, "collect", version, collect_timeout_s=timeout_s, timeout_s=timeout_s + GRACE_S)
    waited_s = time.perf_counter() - started
    write_batch(run.root(), batch)
    get_run_logger().info(
        "batch %d: %d groups, %d trajectories",
        version,
        len(batch.groups),
        sum(len(group.members) for group in batch.groups),
    )
    return {**batch_metrics(batch), "time/waited_s": waited_s}
