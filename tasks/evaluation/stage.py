"""Held-out success of the policy version that the engines hold."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task

from resources.pools.actors import call_sync
from resources.pools.registry import lookup_sync
from resources.rollout.log_forwarding import forwarded_log
from resources.rollout.messages import BatchGroup
from resources.runs import RunRef, evaluation_key
from tasks.evaluation.success import success_by_family

GRACE_S = 30.0


@task(name="evaluate", tags=["pool:control"])
def evaluate_version(
    run: RunRef, version: int, num_episodes: dict[str, int], seed: int, greedy: bool, timeout_s: float
) -> dict[str, Any]:
    """Play ``num_episodes`` held-out episodes of each family; no load may happen meanwhile (one version is measured).

    Writes ``evaluations/<version>.json`` and returns it: success and its standard error by family, and the mean.
    """
    queue = lookup_sync(run.service_id).queue
    with forwarded_log(queue, get_run_logger().warning):
        groups: list[BatchGroup] = call_sync(
            queue,
            "evaluate",
            num_episodes,
            seed,
            greedy=greedy,
            evaluate_timeout_s=timeout_s,
            timeout_s=timeout_s + GRACE_S,
        )
    result = {"version": version, "greedy": greedy, **success_by_family(groups)}
    run.folder().put_json(evaluation_key(version), result)
    get_run_logger().info("version %d: success %s, mean %.3f", version, result["success"], result["mean"])
    return result
