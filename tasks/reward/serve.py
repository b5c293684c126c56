"""One reward replica of one run: opens what the run names, and serves until there is a reason to end."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from resources.object_store import ObjectStore
from resources.rewards.config import RewardsConfig
from resources.rewards.liveness import RUN_HEARTBEAT
from resources.rewards.queue import RewardQueue
from resources.rewards.replica import serve_rewards
from resources.rewards.scorers.arguments import read_scorer_arguments

logger = logging.getLogger(__name__)


def serve(
    store_url: str, run_id: str, config: RewardsConfig, should_stop: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Score what the run asks for; returns what was done (`ReplicaReport` as a dict).

    Raises ValueError when the store holds no such run: the replica looks at another store than the run.
    """
    store = ObjectStore.open(store_url)
    run = store.sub(f"runs/{run_id}")
    if not run.exists(RUN_HEARTBEAT):
        raise ValueError(
            f"store {store.url} holds no run {run_id!r} ({run.uri(RUN_HEARTBEAT)} is missing): "
            "a reward replica must reach the store of the run that it serves under the same url"
        )
    arguments = read_scorer_arguments(store, run_id)
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    queue = RewardQueue(store, run_id, max_attempts=config.max_attempts, clock_skew_s=config.clock_skew_s)
    logger.info("reward replica %s serves run %s at %s", owner, run_id, store.url)
    report = serve_rewards(queue, config, owner=owner, scorer_arguments=arguments, should_stop=should_stop)
    return asdict(report)
