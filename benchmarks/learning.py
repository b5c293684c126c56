"""Does the quickstart learn? Held-out success before and after, by family, over several seeds.

``python -m benchmarks.learning [--seeds 0 1 2] [--max-staleness 0 1 2 4] [--set key=value]``: each seed is one run of
the command line. Beside it: what a random valid player and the scripted expert reach.

``--async``: what staleness costs. Five seeds at alpha 0, 1, 2 and 4, compared seed by seed with alpha 0; loss of
success with its 95 % interval, speed, and the shares of lags (``learning_async.json``).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any, Literal

from benchmarks.record import HeadlineNumber, record
from benchmarks.staleness_cost import compare_with_synchronous, lag_shares, staleness_headline
from benchmarks.training_run import QUICKSTART, iteration_period_s, train_in_process
from flows.config import load_run_file
from resources.environments.transcripts import policy_rate
from tasks.training.config import TrainingConfig

REFERENCE_EPISODES = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2, with --async 0 to 4")
    parser.add_argument("--max-staleness", type=int, nargs="+", help="one row a seed and bound; default: 1")
    parser.add_argument("--async", action="store_true", dest="asynchrony", help="compare alpha 0, 1, 2, 4 by seed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", help="of the results file: one for each variant that is kept")
    options = parser.parse_args()
    extra = dict(item.split("=", 1) for item in options.set)
    seeds = options.seeds or (list(range(5)) if options.asynchrony else [0, 1, 2])
    bounds = options.max_staleness or ([0, 1, 2, 4] if options.asynchrony else [1])
    if options.asynchrony and 0 not in bounds:
        parser.error("--async compares with max_staleness 0: name it among --max-staleness")

    config = load_run_file(QUICKSTART)
    # Seeds outermost: runs that are compared lie next to each other in time.
    runs = [_run(seed, bound, extra) for seed in seeds for bound in bounds]
    rows: list[dict[str, Any]] = [_reference(config.families, "random"), _reference(config.families, "expert"), *runs]
    if options.asynchrony:
        compared = compare_with_synchronous(runs)
        record(options.name or "learning_async", [*rows, *compared], staleness_headline(compared))
    else:
        record(options.name or "learning", rows, _headline(runs, bounds[0]))


def _headline(runs: list[dict[str, Any]], max_staleness: int) -> dict[str, HeadlineNumber]:
    means = [run["mean"] for run in runs if run["max_staleness"] == max_staleness]
    before = statistics.mean(run["mean_before"] for run in runs)
    return {
        "mean_success": {"value": statistics.mean(means), "bound": 1.0, "unit": "share of held-out episodes"},
        "lowest_success": {"value": min(means), "bound": 1.0, "unit": "share of held-out episodes"},
        "mean_success_before": {"value": before, "bound": 1.0, "unit": "share of held-out episodes"},
        "wall_s": {"value": statistics.median(run["wall_s"] for run in runs), "bound": None, "unit": "s"},
    }


def _reference(families: dict[str, Any], actor: Literal["random", "expert"]) -> dict[str, Any]:
    rates = {
        name: asyncio.run(policy_rate(family, actor, REFERENCE_EPISODES, seed=0)) for name, family in families.items()
    }
    return {"policy": actor, **rates, "mean": statistics.mean(rates.values())}


def _run(seed: int, max_staleness: int, extra: dict[str, str]) -> dict[str, Any]:
    pipeline = "asynchronous" if max_staleness else "synchronous"
    summary = train_in_process(
        {"seed": seed, "rollout.max_staleness": max_staleness, "rollout.pipeline": pipeline, **extra}
    )
    lags = [row.get("staleness/mean") or 0.0 for row in summary["rows"]]
    return {
        "policy": "after RL",
        "loss": extra.get("training.loss.name", TrainingConfig().loss.name),
        "seed": seed,
        "max_staleness": max_staleness,
        **summary["success_after"],
        "mean_before": summary["success_before"]["mean"],
        "iterations": summary["num_iterations"],
        "mean_lag": statistics.mean(lags),
        **lag_shares(summary["rows"], max_staleness),
        "iteration_s": iteration_period_s(summary["rows"]),
        "trajectories": summary["num_trajectories"],
        "wall_s": summary["wall_s"],
        "run_id": summary["run_id"],
    }


if __name__ == "__main__":
    main()
