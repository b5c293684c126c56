"""A run's reward pool: its sign of life, and the autoscaler that launches `serve-rewards` replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flows.config import RunConfig
from flows.opening import needs_reward_pool
from resources.rewards.autoscaler import Autoscaler
from resources.rewards.autoscaler_thread import AutoscalerThread
from resources.rewards.liveness import ReplicaWatch, RunHeartbeat
from resources.rewards.queue import RewardQueue
from resources.rewards.scorers.arguments import write_scorer_arguments
from resources.runs import RunRef
from tasks.reward.launch import PrefectLauncher


class RewardPool:
    """What the driver sees of the pool; all zeros when no family needs it."""

    def __init__(self, autoscaler: AutoscalerThread | None = None) -> None:
        self._autoscaler = autoscaler

    @property
    def num_replicas(self) -> int:
        """Replicas that were alive at the last look."""
        return self._autoscaler.num_replicas if self._autoscaler else 0

    @property
    def last_error(self) -> str | None:
        """Why the last launch failed; None while all is well."""
        return self._autoscaler.last_error if self._autoscaler else None


@contextmanager
def reward_pool(run: RunRef, config: RunConfig) -> Iterator[RewardPool]:
    """Scale reward replicas with the backlog while the block lasts; end them with it. Nothing is started when no family
    is judged on the pool.

    Raises ValueError when the deployment, its work pool or an online worker is missing.
    """
    if not needs_reward_pool(config):
        yield RewardPool()
        return
    # At staleness 0 nothing else would hide a replica's cold start.
    settings = config.rewards.model_copy(update={"start_ahead": config.rewards.start_ahead or config.rollout.max_staleness == 0})
    launcher = PrefectLauncher(run.store_url, run.service_id, settings)
    launcher.check()
    root = run.root()
    write_scorer_arguments(root, run.service_id, config.families)
    queue = RewardQueue(root, run.service_id, max_attempts=settings.max_attempts, clock_skew_s=settings.clock_skew_s)
    watch = ReplicaWatch(root, run.service_id, settings.replica_timeout_s)
    autoscaler = Autoscaler(settings, queue.backlog, launcher.launch, watch.running)
    with RunHeartbeat(root, run.service_id, settings.heartbeat_s):
        try:
            with AutoscalerThread(autoscaler, settings.autoscale_period_s) as thread:
                yield RewardPool(thread)
        finally:
            launcher.cancel_all()
