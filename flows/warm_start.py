"""`warm-start`: short supervised training on scripted expert episodes, cached by content."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.config import RunConfig, state_dir, with_overrides
from flows.opening import check_inputs
from flows.pools import RunPools, run_pools
from flows.server import server_flow
from tasks.warm_start.stage import warm_start_policy

TIMEOUT_S = 1800.0
"""Longest time of one warm start, in seconds."""


@server_flow(name="warm-start", flow_run_name="{config.name}-warm-start", check=check_inputs)
def warm_start(
    config: RunConfig = RunConfig(),  # noqa: B008 - Prefect draws the form from this default
    overrides: dict[str, Any] | None = None,
) -> str:
    """Train the policy of a configuration on its experts' episodes, unless the store has it. Returns its directory."""
    config = with_overrides(config, overrides or {})
    check_inputs(config)
    with run_pools(config.pools, state_dir()) as pools:
        return starting_policy(config, pools)


def starting_policy(config: RunConfig, pools: RunPools) -> str:
    """Directory of the policy that RL starts from, as a subflow on the pools when it has to be made."""
    return make_starting_policy.with_options(task_runner=pools.task_runner())(config)


@flow(name="starting-policy", flow_run_name="starting-policy", validate_parameters=False)
def make_starting_policy(config: RunConfig) -> str:
    """One stage on the learner's class: the cached policy, or a new one."""
    return warm_start_policy.submit(
        store_url=config.store, policy=config.policy, families=dict(config.families), config=config.warm_start, seed=config.seed
    ).result()
