"""What does asynchrony buy? The same work through every pipeline: seconds an iteration, and seconds to a score.

``python -m benchmarks.pipeline [--part iterations score] [--iterations 12] [--seeds 0 1 2]``

*iterations*: environments that wait and a learner that waits, on the real rollout plane and simulated engines, without
Prefect and Dask around (`benchmarks.pipeline_plane` says why). The bound of each pipeline is printed beside
(`benchmarks.pipeline_workloads`), from the rollout times of the same run; a run whose learner takes no time says how
long training has to take.

*score*: the quickstart as users start it, its environments slowed down, until its training success has reached a score.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.pipeline_workloads import PIPELINES, WORKLOADS, Pipeline, Workload
from benchmarks.record import HeadlineNumber, headline_number, record

SYNCHRONOUS, ONE_OFF, ASYNCHRONOUS = PIPELINES[:3]
CALIBRATION_ITERATIONS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=("iterations", "score"), default=["iterations", "score"])
    parser.add_argument("--iterations", type=int, default=12, help="measured iterations of each workload and pipeline")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs to a score")
    parser.add_argument("--score", type=float, default=0.8, help="mean success over families, trailing mean of three")
    parser.add_argument("--latency", type=float, default=0.5, help="mean seconds of an environment step, for the score")
    parser.add_argument("--max-iterations", type=int, default=30, help="of a run to a score")
    parser.add_argument("--name", default="pipeline", help="of the results file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    headline: dict[str, HeadlineNumber] = {}
    if "iterations" in options.part:
        timed = [row for workload in WORKLOADS for row in time_iterations(workload, options.iterations)]
        rows += timed
        headline |= iterations_headline(timed)
    if "score" in options.part:
        # Imported here: the other part needs no flow.
        from benchmarks.pipeline_score import score_headline, time_to_score

        scored = time_to_score(
            options.seeds, options.score, latency_s=options.latency, max_iterations=options.max_iterations
        )
        rows += scored
        headline |= score_headline(scored)
    record(options.name, rows, headline)


def time_iterations(workload: Workload, num_iterations: int) -> list[dict[str, Any]]:
    """A row a pipeline. The first iterations, in which it fills, are left out."""
    from benchmarks.pipeline_plane import play

    calibration = play(workload, SYNCHRONOUS, 0.0, CALIBRATION_ITERATIONS)
    training_s = workload.training_share * statistics.mean(calibration.waves_s[1:])
    rows = []
    for pipeline in PIPELINES:
        filling = pipeline.max_staleness + 2
        played = play(workload, pipeline, training_s, filling + num_iterations)
        measured_s = (played.loads[-1] - played.loads[filling - 1]) / num_iterations
        rollouts_s = played.waves_s[filling:]
        bound_s = pipeline.bound_s(rollouts_s, training_s)
        num_trained = sum(played.lags.values())
        rows.append(
            {
                "workload": workload.name,
                "pipeline": pipeline.name,
                "rollout_s": statistics.mean(rollouts_s),
                "training_s": training_s,
                "iteration_s": measured_s,
                "bound_s": bound_s,
                "over_bound": measured_s / bound_s - 1.0,
                "mean_lag": sum(lag * number for lag, number in played.lags.items()) / num_trained,
                "evicted_groups": played.num_evicted,
            }
        )
    return rows


def iterations_headline(rows: Sequence[dict[str, Any]]) -> dict[str, HeadlineNumber]:
    """Geometric means over the workloads, asynchronous at alpha 1; and by workload the worst excess over a bound."""
    excess = {
        name: max(row["over_bound"] for row in rows if row["workload"] == name)
        for name in dict.fromkeys(row["workload"] for row in rows)
    }
    return {
        "speedup_vs_synchronous": _speedup(rows, SYNCHRONOUS),
        "speedup_vs_one_off": _speedup(rows, ONE_OFF),
        **{f"excess_over_bound, {name}": headline_number(value, "share of it", 0.0) for name, value in excess.items()},
    }


def _speedup(rows: Sequence[dict[str, Any]], against: Pipeline) -> HeadlineNumber:
    def ratio(column: str) -> float:
        of = {(row["workload"], row["pipeline"]): row[column] for row in rows}
        workloads = dict.fromkeys(row["workload"] for row in rows)
        return statistics.geometric_mean(of[name, against.name] / of[name, ASYNCHRONOUS.name] for name in workloads)

    return headline_number(ratio("iteration_s"), "times, at alpha 1; geometric mean of the workloads", ratio("bound_s"))


if __name__ == "__main__":
    main()
