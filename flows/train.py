"""`train`: the run. It opens the pools, warms the policy up, loops over iterations, and sums up."""

from __future__ import annotations

import time
from typing import Any

from prefect import get_run_logger

from flows.config import RunConfig
from flows.drivers import noted_driver
from flows.evaluation import evaluate_plane
from flows.iteration import NUM_STAGES, IterationPlan, rl_iteration
from flows.opening import check_resume, composed, open_run
from flows.plane import rollout_plane
from flows.pools import run_pools
from flows.progress import RunProgress
from flows.report import RunReport, read_evaluation
from flows.reward_pool import reward_pool
from flows.server import server_flow, server_ui_url
from flows.turns import Iterations
from flows.warm_start import starting_policy
from resources.runs import ResumePoint, RunRef, check_name
from resources.state_dir import state_dir


def check_arguments(config: RunConfig, overrides: dict[str, Any] | None, resume: str | None) -> None:
    """Raises ValueError for what `train` cannot work with; starts and changes nothing."""
    config = composed(config, overrides)
    check_name(config.name)
    if resume is not None:
        check_resume(config, resume)


@server_flow(name="train", flow_run_name="{config.name}", check=check_arguments)
def train(
    config: RunConfig = RunConfig(),  # noqa: B008 - Prefect draws the form from this default
    overrides: dict[str, Any] | None = None,
    resume: str | None = None,
) -> dict[str, Any]:
    """Train a policy on several task families.

    Args:
        config: the run's configuration.
        overrides: dotted keys of it to replace, e.g. ``{"training.optimizer.learning_rate": 1e-3}``.
        resume: id of a run in the same store (``latest``: the newest), to go on behind its last completed iteration.

    Returns the summary, which is also written as ``summary.json``. Raises ValueError for bad input before anything
    starts.
    """
    config = composed(config, overrides)
    with open_run(config, resume) as (run, point), noted_driver(run, state_dir()):
        return _train(config, run, point)


def _train(config: RunConfig, run: RunRef, point: ResumePoint | None) -> dict[str, Any]:
    first, last = (point.version if point else 0), config.num_iterations
    started = time.time()
    get_run_logger().info("run %s, store %s", run.run_id, run.store_url)
    report = RunReport(run, config)
    before, after = read_evaluation(run, 0, config.evaluation), None
    with (
        Iterations(overlap=config.rollout.pipeline != "synchronous") as iterations,
        run_pools(config.pools, state_dir(), config.engine.backend) as pools,
        RunProgress(list(config.families), last, first) as progress,
    ):
        progress.say(f"run {run.run_id}, Prefect UI {server_ui_url()}\nfiles: {run.folder().url}")
        progress.say("preparing the policy (a warm start takes about a minute, once)")
        model_directory = starting_policy(config, pools)
        pools.wait_for_imports()
        with (
            rollout_plane(
                pools.client, pools.serving, run, config, model_directory, point, get_run_logger().warning
            ) as plane,
            reward_pool(run, config) as autoscaler,
            pools.stages_cancelled_on_error(),
        ):
            if config.evaluation.before and point is None:
                progress.say(f"evaluating: {config.evaluation.num_episodes} held-out episodes of each task family")
                before = evaluate_plane(pools, run, config, version=0)

            def play(version: int) -> dict[str, Any]:
                plane.check()
                iteration = rl_iteration.with_options(task_runner=pools.task_runner())
                return iteration(run, version, IterationPlan.of(config, version))

            for row in iterations.run(play, range(first, last), NUM_STAGES * config.iteration_timeout_s):
                report.iteration(row, autoscaler)
                progress.iteration(row, autoscaler.num_replicas if autoscaler else 0)
            if config.evaluation.after:
                progress.say("evaluating the last version")
                after = evaluate_plane(pools, run, config, version=last)
    return report.finish(before, after, time.time() - started, progress)


if __name__ == "__main__":
    # Through the package, so that what is pickled to Dask workers is defined in `flows.train`, not in `__main__`.
    import sys

    from flows.command_line import main

    sys.exit(main())
