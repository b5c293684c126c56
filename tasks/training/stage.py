"""Stage 2, update: train the learner on the iteration's batch. Before it, with `training.streamed`, stream: begin with
what the batch already holds."""

from __future__ import annotations

import time
from typing import Any

from prefect import get_run_logger, task

from resources.failures import DeadlineExceeded
from resources.pools.actors import call_sync
from resources.pools.registry import lookup_sync
from resources.rollout.messages import Reserved
from resources.runs import RunRef

WAIT_S = 5.0
"""How long the group queue keeps a question for further groups."""
GRACE_S = 30.0
"""Granted to the call itself beside that."""


@task(name="stream", tags=["pool:learner"])
def stream(run: RunRef, version: int, timeout_s: float) -> int:
    """Hand the groups of batch ``version`` to the learner as they are scored, until the batch is complete; the number
    of groups handed over. The learner holds that version already. No weight changes.

    Raises DeadlineExceeded after ``timeout_s`` seconds.
    """
    actors = lookup_sync(run.service_id, max_age_s=0.0)
    assert actors.learner is not None, f"run {run.run_id} has no learner"
    deadline = time.monotonic() + timeout_s
    known: list[str] = []
    while True:
        reserved: Reserved = call_sync(actors.queue, "reserved", version, known, WAIT_S, timeout_s=WAIT_S + GRACE_S)
        remaining = deadline - time.monotonic()
        if reserved.is_all:  # what is left of it, the update reads from the manifest
            return len(known)
        if remaining <= 0:
            raise DeadlineExceeded(f"batch {version} is not complete after {timeout_s:.0f} s; {len(known)} groups are")
        if reserved.groups:
            call_sync(actors.learner, "stream", version, reserved.groups, timeout_s=remaining)
            known += [group.group_id for group in reserved.groups]


@task(name="update", tags=["pool:learner"])
def update(run: RunRef, version: int, timeout_s: float) -> dict[str, Any]:
    """Train on batch ``version``; returns the update's metrics. What the learner raises is a crash of the stage."""
    learner = lookup_sync(run.service_id, max_age_s=0.0).learner
    assert learner is not None, f"run {run.run_id} has no learner"
    metrics = call_sync(learner, "update", version, timeout_s=timeout_s)
    get_run_logger().info("update %d: %s", version, {k: v for k, v in metrics.items() if k.startswith("time/")})
    return metrics
