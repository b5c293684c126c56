"""`evaluate`: held-out success of one policy version."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger

from flows.config import RunConfig, default_store
from flows.drivers import noted_driver
from flows.plane import rollout_plane
from flows.pools import RunPools, run_pools
from flows.reward_pool import reward_pool
from flows.server import server_flow
from resources.runs import ResumePoint, RunRef, find_run
from resources.state_dir import state_dir
from resources.weights.store import WeightStore
from tasks.evaluation.stage import evaluate_version


@server_flow(name="evaluate", flow_run_name="evaluate-{run_id}")
def evaluate(
    store: str | None = None,
    run_id: str = "latest",
    version: int | None = None,
    num_episodes: int | None = None,
    greedy: bool = False,
    pools_address: str | None = None,
) -> dict[str, Any]:
    """Play held-out episodes under one published version of a run, on engines of its own.

    Args:
        store: the object store that holds the run; the project's own when left out.
        run_id: the run; ``latest``: the newest one.
        version: policy version; left out: the newest published one.
        num_episodes: episodes of each family; left out: as the run's configuration says.
        greedy: take the most likely token instead of sampling.
        pools_address: a standing Dask scheduler; left out: an embedded cluster.

    Returns success and standard error by family, and the mean (also in the run's ``evaluations/``). Raises ValueError
    for a run or a version that does not exist.
    """
    run = find_run(store or default_store(), run_id)
    config = RunConfig.model_validate(run.folder().get_json("config.json"))
    config = config.model_copy(update={"pools": config.pools.model_copy(update={"address": pools_address})})
    published = WeightStore(run.root(), run.run_id).versions()
    version = version if version is not None else max(published, default=0)
    if version not in published:
        raise ValueError(f"version {version} of run {run.run_id} is not in its weight store; published: {published}")
    if num_episodes is not None:
        evaluation = config.evaluation.model_copy(update={"num_episodes": num_episodes})
        config = config.model_copy(update={"evaluation": evaluation})
    point = ResumePoint(version=version, queue_state={"version": version})
    beside = run.beside("evaluation")
    beside.service_folder().put_json("config.json", config.model_dump(mode="json"))
    with noted_driver(beside, state_dir()), run_pools(config.pools, state_dir(), config.engine.backend) as pools:
        pools.wait_for_imports()
        log = get_run_logger().warning
        with rollout_plane(pools.client, pools.serving, beside, config, None, point, log), reward_pool(beside, config):
            return evaluate_plane(pools, beside, config, version, greedy=greedy)


def evaluate_plane(
    pools: RunPools, run: RunRef, config: RunConfig, version: int, *, greedy: bool | None = None
) -> dict[str, Any]:
    """Evaluate the version that a living plane's engines hold, as a subflow on its pools."""
    settings = config.evaluation
    return evaluate_held_version.with_options(task_runner=pools.task_runner())(
        run,
        version,
        dict.fromkeys(config.families, settings.num_episodes),
        config.seed,
        settings.greedy if greedy is None else greedy,
        settings.timeout_s,
    )


@flow(name="evaluate-version", flow_run_name="evaluate-version-{version}", validate_parameters=False)
def evaluate_held_version(
    run: RunRef, version: int, num_episodes: dict[str, int], seed: int, greedy: bool, timeout_s: float
) -> dict[str, Any]:
    """One evaluation on the engines of a living plane."""
    return evaluate_version.submit(run, version, num_episodes, seed, greedy, timeout_s).result()
