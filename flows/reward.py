"""`serve-rewards`: one elastic reward replica, a run of this flow on the serverless work pool."""

from __future__ import annotations

from typing import Any

from prefect import flow

from resources.rewards.config import RewardsConfig
from tasks.reward.serve import serve


@flow(name="serve-rewards", flow_run_name="rewards-{run_id}", log_prints=False)
def serve_rewards(store: str, run_id: str, config: RewardsConfig | None = None) -> dict[str, Any]:
    """Score what run ``run_id`` asks for; end after ``config.keep_alive_s`` without work, or with the run.

    Stateless: a replica may be started, killed or doubled at any time. Returns what it did.
    """
    return serve(store, run_id, config or RewardsConfig())
