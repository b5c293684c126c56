"""Which algorithm? Every estimator and every loss on the quickstart policy, at staleness 0 and 2, over several seeds.

    python -m benchmarks.algorithms [--cells NAME ...] [--updates N] [--seeds 0 1 2] [--alphas 0 2] [--report]

A cell is one algorithm; it is trained by `benchmarks.algorithms_loop`, in one process on one thread, from one
warm-started policy. A finished run is appended to a file in the state folder at once, and is never run again:
interrupted, the same command goes on. ``--report`` prints what is there and runs nothing. An estimate of the time that
is left stands before each run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.record import headline_number, record
from benchmarks.resumable_runs import QUICKSTART, RunFile, train_missing
from benchmarks.staleness_cost import PairedDifference, paired_difference
from flows.config import load_run_file
from tasks.training.config import TrainingConfig

DEFAULT = "grpo + ppo_clip"
CELLS: Mapping[str, dict[str, Any]] = {
    DEFAULT: {},
    "grpo, batch scaling": {"advantage": {"scaling": "batch"}},
    "dr. grpo": {"advantage": {"scaling": "none"}, "normaliser": "fixed_length", "fixed_length_tokens": 64},
    "grpo, task normalisation": {"advantage": {"normalisation": "family"}},
    "rloo": {"advantage": {"estimator": "rloo"}},
    "reinforce++": {"advantage": {"estimator": "reinforce_plus_plus"}},
    "reinforce++ baseline": {"advantage": {"estimator": "reinforce_plus_plus_baseline"}},
    "gdpo": {"advantage": {"estimator": "gdpo"}},
    "gigpo": {"advantage": {"estimator": "gigpo", "discount": 0.95}},
    "turn returns": {"advantage": {"estimator": "turn_returns", "discount": 0.95}},
    "gae": {"advantage": {"estimator": "gae", "normalisation": "batch"}, "critic": {}},
    "policy gradient": {"loss": {"name": "policy_gradient"}},
    "ppo, dual clip": {"loss": {"name": "ppo_clip", "dual_clip": 3.0}},
    "ppo to proximal": {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}},
    "gspo": {"loss": {"name": "gspo", "clip_low": 0.02, "clip_high": 0.03}, "normaliser": "sequence_mean"},
    "cispo": {"loss": {"name": "cispo"}},
    "tis": {"loss": {"name": "tis"}},
    "topr": {"loss": {"name": "topr"}},
    "kimi": {"loss": {"name": "kimi"}},
    "decoupled": {"loss": {"name": "decoupled"}},
    "decoupled, loglinear": {"loss": {"name": "decoupled", "proximal": "loglinear"}},
    "icepop": {
        "loss": {"name": "ppo_clip", "ratio_to": "proximal"},
        "corrections": [{"name": "masked_weight", "low": 0.5, "high": 5.0}],
    },
    "m2po": {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}, "corrections": [{"name": "m2po"}]},
    "entropy bonus": {"loss": {"name": "ppo_clip", "entropy_coefficient": 0.003}},
}
"""What each cell does otherwise than the quickstart."""


def training_of(cell: str, base: TrainingConfig) -> TrainingConfig:
    return TrainingConfig.model_validate({**base.model_dump(), **CELLS[cell]})


def collapsed(run: Mapping[str, Any]) -> bool:
    """Whether training ended early, or a family ended below half of the held-out success that it began with: a family
    can be lost behind a mean that rises."""
    return bool(run["failed"]) or any(
        run["by_family"][name] < start / 2 for name, start in run["start_by_family"].items()
    )


def summarise_cells(runs: Sequence[Mapping[str, Any]], alphas: Sequence[int]) -> list[dict[str, Any]]:
    """One row a cell, by staleness: mean and lowest final success over seeds, the difference to the default (95 %
    interval over paired seeds), and collapses."""
    rows = []
    for cell in CELLS:
        row: dict[str, Any] = {"algorithm": cell}
        for alpha in alphas:
            done = [run for run in runs if run["cell"] == cell and run["alpha"] == alpha]
            if done:
                finals = [run["final_success"] for run in done]
                row |= {
                    f"success, alpha {alpha}": statistics.mean(finals),
                    f"lowest, alpha {alpha}": min(finals),
                    f"beside default, alpha {alpha}": interval_text(found)
                    if (found := beside_default(runs, cell, alpha))
                    else "",
                    f"collapses, alpha {alpha}": f"{sum(collapsed(run) for run in done)} of {len(done)}",
                }
        if len(row) > 1:
            rows.append(row)
    return rows


def headline_of(runs: Sequence[Mapping[str, Any]], alphas: Sequence[int]) -> dict[str, Any]:
    """The default beside the best, by staleness."""
    headline = {}
    for alpha in alphas:
        means = {
            cell: statistics.mean(finals)
            for cell in CELLS
            if (finals := [run["final_success"] for run in runs if run["cell"] == cell and run["alpha"] == alpha])
        }
        if DEFAULT in means:
            headline[f"default_success_alpha_{alpha}"] = headline_number(means[DEFAULT], "share of episodes", bound=1.0)
        if means:
            headline[f"best_success_alpha_{alpha}"] = headline_number(
                max(means.values()), "share of episodes", bound=1.0
            )
    return headline


def beside_default(runs: Sequence[Mapping[str, Any]], cell: str, alpha: int) -> PairedDifference | None:
    """Final success of the cell less the default's, seed by seed; None with fewer than two seeds that both have."""
    own, default = (
        {run["seed"]: run["final_success"] for run in runs if run["cell"] == name and run["alpha"] == alpha}
        for name in (cell, DEFAULT)
    )
    seeds = sorted(own.keys() & default.keys())
    if cell == DEFAULT or len(seeds) < 2:
        return None
    return paired_difference([own[seed] for seed in seeds], [default[seed] for seed in seeds])


def interval_text(difference: PairedDifference) -> str:
    return f"{difference.mean:+.3f}, {difference.low:+.3f} to {difference.high:+.3f}"


def advice(runs: Sequence[Mapping[str, Any]], alphas: Sequence[int]) -> str:
    """Which default the figures support, by staleness: the cells whose 95 % interval beside the default leaves 0 out. A
    cell with a collapsed run is never above it."""
    sentences = []
    for alpha in alphas:
        compared = {cell: found for cell in CELLS if (found := beside_default(runs, cell, alpha))}
        if not compared:
            continue
        unstable = {run["cell"] for run in runs if run["alpha"] == alpha and collapsed(run)}
        above = [cell for cell, found in compared.items() if (found.low or 0.0) > 0 and cell not in unstable]
        below = [cell for cell, found in compared.items() if (found.high or 0.0) < 0]
        described = [
            f"{side} the default: "
            + ("; ".join(f"{cell} ({interval_text(compared[cell])})" for cell in cells) or "none")
            for side, cells in (("above", above), ("below", below))
        ]
        sentences.append(
            f"alpha {alpha}: {', '.join(described)}; collapsed: {', '.join(sorted(unstable)) or 'none'}; no difference "
            f"shown for {len(compared) - len(above) - len(below)} of {len(compared)}"
        )
    return ". ".join(sentences)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.add_argument("--cells", nargs="+", choices=sorted(CELLS), default=list(CELLS))
    parser.add_argument("--updates", type=int, default=40, help="of each run (default: 40)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--alphas", type=int, nargs="+", default=[0, 2], help="versions between sampling and training")
    parser.add_argument("--episodes", type=int, default=64, help="held-out episodes of each family (default: 64)")
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    options = parser.parse_args(arguments)
    if options.updates < 2:
        parser.error(f"--updates is {options.updates}; a run needs at least 2")
    config = load_run_file(QUICKSTART)
    runs = RunFile.named(f"algorithms-{options.updates}-{options.episodes}")
    # Seeds outermost: runs that are compared lie next to each other in time, and an interrupted matrix is a fair one.
    wanted = [(cell, alpha, seed) for seed in options.seeds for alpha in options.alphas for cell in options.cells]
    if not options.report:
        train_missing(
            wanted, lambda cell: training_of(cell, config.training), config, options.updates, options.episodes, runs
        )
    # Whatever there is of these cells is counted: those that a decision hangs on may have been given more seeds.
    done = [run for run in runs.rows() if run["cell"] in options.cells and run["alpha"] in options.alphas]
    missing = len(set(wanted) - {(run["cell"], run["alpha"], run["seed"]) for run in done})
    record(
        "algorithms",
        summarise_cells(done, options.alphas),
        headline_of(done, options.alphas),
        notes=f"{options.updates} updates, held-out {options.episodes} episodes a family, {len(done)} runs; each "
        "cell's number of seeds stands beside its collapses. 95 % intervals: one of twenty misses by chance. "
        f"{advice(done, options.alphas)}" + (f". {missing} runs are missing: run the command again" if missing else ""),
    )


if __name__ == "__main__":
    main()
