"""What does staleness cost in success, and what does it gain in speed? Runs compared seed by seed with alpha 0."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.record import HeadlineNumber, headline_number

# Two-sided 95 % quantiles of Student's t, by degrees of freedom (any statistics table).
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class PairedDifference(NamedTuple):
    """Mean of paired differences and its 95 % interval (Student's t); no interval from a single pair."""

    mean: float
    low: float | None
    high: float | None


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Of ``first - second``, pair by pair. ValueError when the numbers of values differ, or are 0 or above 16."""
    if len(first) != len(second) or not 1 <= len(first) <= len(T_975) + 1:
        raise ValueError(f"{len(first)} and {len(second)} values: pairs are needed, 1 to {len(T_975) + 1} of them")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = statistics.mean(differences)
    if len(differences) == 1:
        return PairedDifference(mean, None, None)
    half = T_975[len(differences) - 2] * statistics.stdev(differences) / len(differences) ** 0.5
    return PairedDifference(mean, mean - half, mean + half)


def lag_shares(rows: Sequence[Mapping[str, Any]], max_staleness: int) -> dict[str, float]:
    """``lag_0`` ... ``lag_<max_staleness>``: shares of the trained trajectories by lag, of a run's metrics rows."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update({int(lag): number for lag, number in row["staleness/lag_histogram"].items()})
    total = sum(counts.values())
    return {f"lag_{lag}": counts[lag] / total for lag in range(max([max_staleness, *counts]) + 1)} if total else {}


def compare_with_synchronous(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a bound: success lost and time gained against the run of the same seed at alpha 0.

    Each run has ``seed``, ``max_staleness``, ``mean`` (success), ``iteration_s`` and its lag shares. Raises ValueError
    when a seed lacks a bound that another one has, or alpha 0 is missing.
    """
    by_bound: dict[int, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_bound.setdefault(run["max_staleness"], {})[run["seed"]] = run
    seeds = sorted(by_bound.get(0, {}))
    if not seeds or any(sorted(of_seed) != seeds for of_seed in by_bound.values()):
        raise ValueError("every seed needs a run at max_staleness 0 and at every other bound that is compared")
    synchronous = [by_bound[0][seed] for seed in seeds]
    rows = []
    for bound, of_seed in sorted(by_bound.items()):
        own = [of_seed[seed] for seed in seeds]
        loss = paired_difference([run["mean"] for run in synchronous], [run["mean"] for run in own])
        speedups = [before["iteration_s"] / run["iteration_s"] for before, run in zip(synchronous, own, strict=True)]
        lags = {key for run in own for key in run if key.startswith("lag_")}
        rows.append(
            {
                "policy": f"{len(seeds)} seeds",
                "max_staleness": bound,
                "mean": statistics.mean(run["mean"] for run in own),
                "loss_of_success": loss.mean,
                "loss_low": loss.low,
                "loss_high": loss.high,
                "iteration_s": statistics.median(run["iteration_s"] for run in own),
                "speedup": statistics.median(speedups),
                **{key: statistics.mean(run.get(key, 0.0) for run in own) for key in sorted(lags)},
            }
        )
    return rows


def staleness_headline(compared: Sequence[Mapping[str, Any]]) -> dict[str, HeadlineNumber]:
    """Of the rows of `compare_with_synchronous`: loss of success with its interval, and speed, at every alpha above 0.

    Nothing bounds either by physics; a loss of 0 is what an unchanged learning curve has.
    """
    headline = {}
    for row in compared:
        alpha = row["max_staleness"]
        if alpha == 0:
            continue
        for name in ("loss_of_success", "loss_low", "loss_high"):
            if row[name] is not None:
                headline[f"{name}_at_{alpha}"] = headline_number(row[name], "share of held-out episodes")
        headline[f"speedup_at_{alpha}"] = headline_number(row["speedup"], "times alpha 0, median iteration")
    return headline
