"""Seconds until the quickstart's policy, its environments slowed down, has reached a score, by pipeline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pipeline_workloads import PIPELINES
from benchmarks.record import HeadlineNumber, headline_number
from benchmarks.slow_environments import SLOW
from benchmarks.training_run import QUICKSTART, iteration_period_s, train_in_process
from flows.config import load_run_file

WINDOW = 3
"""Iterations whose success is averaged: one batch is noisy."""
COMPARED = PIPELINES[:3]


def time_to_score(seeds: Sequence[int], score: float, *, latency_s: float, max_iterations: int) -> list[dict[str, Any]]:
    """A row a seed and pipeline. Seeds outermost, so that what is compared lies close in time.

    Every run of a seed starts from the same policy: the quickstart's warm start, made with the environments as they
    are. Evaluations are left out; what counts is the success of the trained trajectories.
    """
    from flows.warm_start import warm_start

    config = load_run_file(QUICKSTART)
    slowed: dict[str, Any] = {}
    for name, family in config.families.items():
        slowed[f"families.{name}.environment"] = SLOW[family.environment]
        slowed[f"families.{name}.arguments"] = {**family.arguments, "latency_s": latency_s}
    rows = []
    for seed in seeds:
        start = warm_start(config, {"seed": seed})
        for pipeline in COMPARED:
            summary = train_in_process(
                {
                    **slowed,
                    "seed": seed,
                    "num_iterations": max_iterations,
                    "policy.model_directory": start,
                    "warm_start": "null",
                    "evaluation.before": False,
                    "evaluation.after": False,
                    "rollout.pipeline": pipeline.pipeline,
                    "rollout.max_staleness": pipeline.max_staleness,
                }
            )
            reached = seconds_to(score, summary["rows"], list(config.families))
            rows.append(
                {
                    "workload": f"quickstart, steps of {latency_s:g} s",
                    "pipeline": pipeline.name,
                    "seed": seed,
                    "score": score,
                    "time_to_score_s": reached,
                    "iteration_s": iteration_period_s(summary["rows"]),
                    "last_success": trailing_success(summary["rows"], list(config.families))[-1],
                    "run_id": summary["run_id"],
                }
            )
    return rows


def trailing_success(rows: Sequence[Mapping[str, Any]], families: Sequence[str]) -> list[float]:
    """By iteration: mean over families of the share of trained trajectories that succeeded, over the last three."""
    means = [statistics.mean(row.get(f"success/{name}", 0.0) for name in families) for row in rows]
    return [statistics.mean(means[max(0, index - WINDOW + 1) : index + 1]) for index in range(len(means))]


def seconds_to(score: float, rows: Sequence[Mapping[str, Any]], families: Sequence[str]) -> float | None:
    """From the first iteration's start to the record of the first one whose trailing success reaches the score; None:
    it was not reached. The first iterations, which have no three to average, do not count."""
    started = rows[0]["time/started_at"]
    for index, success in enumerate(trailing_success(rows, families)):
        if index >= WINDOW - 1 and success >= score:
            return rows[index]["recorded_at"] - started
    return None


def score_headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, HeadlineNumber]:
    """Medians over seeds of the paired ratios. A seed of which a run did not reach the score is in none."""
    headline = {}
    synchronous, one_off, asynchronous = (pipeline.name for pipeline in COMPARED)
    for name, other in (("synchronous", synchronous), ("one_off", one_off)):
        ratios = paired_ratios(rows, other, asynchronous)
        if ratios:
            headline[f"time_to_score_vs_{name}"] = headline_number(
                statistics.median(ratios), f"times sooner at alpha 1, median of {len(ratios)} seeds"
            )
    return headline


def paired_ratios(rows: Sequence[Mapping[str, Any]], slower: str, faster: str) -> list[float]:
    """``slower`` over ``faster``, seed by seed, where both reached the score."""
    reached = {(row["pipeline"], row["seed"]): row["time_to_score_s"] for row in rows}
    seeds = dict.fromkeys(row["seed"] for row in rows)
    pairs = [(reached.get((slower, seed)), reached.get((faster, seed))) for seed in seeds]
    return [first / second for first, second in pairs if first is not None and second is not None]
