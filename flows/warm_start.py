"""`warm-start`: short supervised training on scripted expert episodes, cached by content."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.config import RunConfig
from flows.opening import composed
from flows.pools import RunPools, run_pools
from flows.server import server_flow
from resources.state_dir import state_dir
from tasks.warm_start.stage import warm_start_policy


def _check(config: RunConfig, overrides: dict[str, Any] | None) -> None:
    composed(config, overrides)


@server_flow(name="warm-start", flow_run_name="{config.name}-warm-start", check=_check)
def warm_start(
    config: RunConfig = RunConfig(),  # noqa: B008 - Prefect draws the form from this default
    overrides: dict[str, Any] | None = None,
) -> str:
    """Train the policy of a configuration on its experts' episodes, unless the store has it. Returns its directory."""
    config = composed(config, overrides)
    with run_pools(config.pools, state_dir(), config.engine.backend) as pools:
        return starting_policy(config, pools)


def starting_policy(config: RunConfig, pools: RunPools) -> str:
    """Directory of the policy that RL starts from: the given model, or its warm start (a subflow on the pools)."""
    if config.warm_start is None:
        assert config.policy.model_directory is not None, "RunConfig refuses this combination"
        return config.policy.model_directory
    pools.wait_for_imports("learner")
    return make_warm_start.with_options(task_runner=pools.task_runner())(config)["directory"]


@flow(name="make-warm-start", flow_run_name="make-warm-start", validate_parameters=False)
def make_warm_start(config: RunConfig) -> dict[str, Any]:
    """One stage on the learner's class: the cached policy, or a new one."""
    assert config.warm_start is not None, "starting_policy asks for a warm start only when one is configured"
    learner = config.pools.classes[config.pools.of_role("learner")[0]]
    return warm_start_policy.submit(
        config.store,
        config.policy,
        dict(config.families),
        config.warm_start,
        config.seed,
        learner.device,
        learner.torch_threads,
    ).result()
