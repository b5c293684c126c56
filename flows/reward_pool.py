"""A run's reward pool: its sign of life, and the autoscaler that launches `serve-rewards` replicas."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flows.config import RunConfig
from flows.deployment import ensure_reward_deployment
from flows.opening import needs_reward_pool
from resources.rewards.autoscaler_thread import AutoscalerThread
from resources.rewards.elastic_pool import elastic_pool
from resources.rewards.liveness import RunHeartbeat
from resources.rewards.scorers.arguments import write_scorer_arguments
from resources.runs import RunRef
from tasks.reward.launch import PrefectLauncher

logger = logging.getLogger(__name__)
END_S = 15.0
"""Longest wait for the replicas' flow runs to end in order, at the end of a run."""
END_HURRIED_S = 1.0
"""The same when the run fails or is interrupted."""


@contextmanager
def reward_pool(run: RunRef, config: RunConfig) -> Iterator[AutoscalerThread | None]:
    """Scale reward replicas with the backlog while the block lasts, and end them with it.

    Yields None, and gives only the run's sign of life, when no family is judged on the pool. Raises ValueError when the
    deployment, its work pool or an online worker is missing.
    """
    if not needs_reward_pool(config):
        with RunHeartbeat(run.root(), run.service_id, config.rewards.heartbeat_s):
            yield None
        return
    # At staleness 0 nothing else would hide a replica's cold start.
    start_ahead = config.rewards.start_ahead or config.rollout.max_staleness == 0
    settings = config.rewards.model_copy(update={"start_ahead": start_ahead})
    launcher = PrefectLauncher(run.store_url, run.service_id, settings)
    ensure_reward_deployment(settings)
    launcher.check()
    write_scorer_arguments(run.root(), run.service_id, config.families)
    patience_s = END_HURRIED_S
    try:
        with elastic_pool(run.root(), run.service_id, settings, launcher.launch) as autoscaler:
            yield autoscaler
        patience_s = END_S
    finally:
        try:
            launcher.end_all(timeout_s=patience_s)
        except ValueError as error:  # the server is gone; replicas end by the missing sign of life
            logger.warning("reward replicas could not be ended through the server: %s", error)
