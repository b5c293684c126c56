"""Does the quickstart learn? Held-out success before and after, by family, over several seeds.

``python -m benchmarks.learning [--seeds 0 1 2] [--max-staleness 0 1 2 4] [--set key=value]``: each seed is one run of
the command line. Beside it: what a random valid player and the scripted expert reach.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any, Literal

from benchmarks.record import record
from benchmarks.training_run import QUICKSTART, train_in_process
from flows.config import load_run_file
from resources.environments.transcripts import policy_rate
from tasks.training.config import TrainingConfig

REFERENCE_EPISODES = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[1], help="one row a seed and bound")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", default="learning", help="of the results file: one for each variant that is kept")
    options = parser.parse_args()
    extra = dict(item.split("=", 1) for item in options.set)

    config = load_run_file(QUICKSTART)
    rows: list[dict[str, Any]] = [_reference(config.families, "random"), _reference(config.families, "expert")]
    # Seeds outermost: runs that are compared lie next to each other in time.
    for seed in options.seeds:
        for bound in options.max_staleness:
            rows.append(_run(seed, bound, extra))
    done = [row for row in rows if row["policy"] == "after RL"]
    means = [row["mean"] for row in done if row["max_staleness"] == options.max_staleness[0]]
    record(
        options.name,
        rows,
        {
            "mean_success": {"value": statistics.mean(means), "bound": 1.0, "unit": "share of held-out episodes"},
            "lowest_success": {"value": min(means), "bound": 1.0, "unit": "share of held-out episodes"},
            "mean_success_before": {
                "value": statistics.mean(row["mean_before"] for row in done),
                "bound": 1.0,
                "unit": "share of held-out episodes",
            },
            "wall_s": {"value": statistics.median(row["wall_s"] for row in done), "bound": None, "unit": "s"},
        },
    )


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
        "trajectories": summary["num_trajectories"],
        "wall_s": summary["wall_s"],
        "run_id": summary["run_id"],
    }


if __name__ == "__main__":
    main()
