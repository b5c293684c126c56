"""The reward deployment of a server that has none yet: a run of its own server needs no `prefect deploy`."""

from __future__ import annotations

from prefect.client.orchestration import get_client
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.types.entrypoint import EntrypointType

from flows.reward import serve_rewards
from resources.rewards.config import RewardsConfig


def ensure_reward_deployment(config: RewardsConfig) -> None:
    """Register ``config.deployment`` on ``config.work_pool`` when the server does not know it and has the pool.

    A deployment that exists is left as it is: `prefect deploy` owns it. Without the pool nothing is registered, and
    `PrefectLauncher.check` says what is missing.
    """
    flow_name, name = config.deployment.split("/", 1)
    if flow_name != serve_rewards.name:
        return
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(config.deployment)
            return
        except ObjectNotFound:
            pass
        try:
            client.read_work_pool(config.work_pool)
        except ObjectNotFound:
            return
    deployment = RunnerDeployment.from_flow(
        serve_rewards,
        name,
        work_pool_name=config.work_pool,
        tags=["rollart"],
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployment.apply()
