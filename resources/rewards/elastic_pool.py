"""A run's reward pool while it lasts: the run's sign of life, and the autoscaler at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from resources.object_store import ObjectStore
from resources.rewards.autoscaler import Autoscaler
from resources.rewards.autoscaler_thread import AutoscalerThread
from resources.rewards.config import RewardsConfig
from resources.rewards.liveness import ReplicaWatch, RunHeartbeat
from resources.rewards.queue import RewardQueue


@contextmanager
def elastic_pool(
    store: ObjectStore, run_id: str, config: RewardsConfig, launch: Callable[[int], None]
) -> Iterator[AutoscalerThread]:
    """Scale reward replicas with the run's backlog while the block lasts; replicas end soon after it.

    ``store`` is the root store. ``launch(n)`` asks for n replicas and returns at once; what it raises is kept in
    ``last_error`` of what this yields, beside the number of replicas and its history.
    """
    queue = RewardQueue(store, run_id, max_attempts=config.max_attempts, clock_skew_s=config.clock_skew_s)
    replicas = ReplicaWatch(store, run_id, config.replica_timeout_s)
    autoscaler = Autoscaler(config, queue.backlog, launch, replicas.running)
    # The heartbeat comes first and ends last: a replica that finds none, or an old one, would end at once.
    with (
        RunHeartbeat(store, run_id, config.heartbeat_s),
        AutoscalerThread(autoscaler, config.autoscale_period_s) as thread,
    ):
        yield thread
