"""Do families whose rewards are small still learn? Reward scales of x0.1, x1 and x10 over the quickstart's families.

    python -m benchmarks.reward_scales [--seeds 0 1 2 3 4] [--updates N] [--alpha 1] [--report]

Three ways to weigh the advantages of such families, each trained by `benchmarks.algorithms_loop` from one warm-started
policy: rewards less their group's mean (Dr. GRPO's advantage, which keeps the scale), the same after task advantage
normalisation (AgentRL, arXiv 2510.04206), and GRPO's division by the group's deviation. Compared seed by seed: the gain
in held-out success of the family that gained least, and of the family whose rewards are smallest. Finished runs are
kept in the state folder: interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.record import HeadlineNumber, headline_number, record
from benchmarks.resumable_runs import QUICKSTART, RunFile, train_missing
from benchmarks.staleness_cost import paired_difference
from flows.config import load_run_file
from tasks.training.config import TrainingConfig

SCALES: Mapping[str, float] = {"frozen_lake": 0.1, "code_repair": 1.0, "calculator": 1.0, "guess_number": 10.0}
SMALLEST = min(SCALES, key=lambda name: SCALES[name])
PLAIN, NORMALISED = "rewards less the group's mean", "the same, normalised by task"
CELLS: Mapping[str, dict[str, Any]] = {
    PLAIN: {"advantage": {"scaling": "none"}},
    NORMALISED: {"advantage": {"scaling": "none", "normalisation": "family"}},
    "divided by the group's deviation": {},
}
"""What each cell does otherwise than the quickstart."""


def training_of(cell: str, base: TrainingConfig) -> TrainingConfig:
    return TrainingConfig.model_validate({**base.model_dump(), **CELLS[cell]})


def gains(run: Mapping[str, Any]) -> dict[str, float]:
    """Held-out success at the end less that at the start, by family."""
    return {name: run["by_family"][name] - run["start_by_family"][name] for name in SCALES}


def worst(run: Mapping[str, Any]) -> float:
    """Gain of the family that gained least."""
    return min(gains(run).values())


def summarise_scales(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a cell: success at the end by family, and gains, means over seeds."""
    rows = []
    for cell in CELLS:
        done = [run for run in runs if run["cell"] == cell]
        if not done:
            continue
        of_all = [gains(run) for run in done]
        rows.append(
            {
                "advantage": cell,
                "seeds": len(done),
                "success": statistics.mean(run["final_success"] for run in done),
                **{
                    f"gain of {name} (x{SCALES[name]:g})": statistics.mean(gain[name] for gain in of_all)
                    for name in SCALES
                },
                "worst gain": statistics.mean(worst(run) for run in done),
                "lowest worst gain": min(worst(run) for run in done),
            }
        )
    return rows


def compare(runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, HeadlineNumber], str]:
    """What task normalisation adds to the worst family's gain and to that of the smallest rewards; empty without a
    pair of runs."""
    by_cell = {cell: {run["seed"]: run for run in runs if run["cell"] == cell} for cell in (PLAIN, NORMALISED)}
    seeds = sorted(by_cell[PLAIN].keys() & by_cell[NORMALISED].keys())
    if not seeds:
        return {}, ""
    headline, verdicts = {}, []
    for name, gain in (("worst_family", worst), (SMALLEST, lambda run: gains(run)[SMALLEST])):
        pairs = [[gain(by_cell[cell][seed]) for seed in seeds] for cell in (NORMALISED, PLAIN)]
        found = paired_difference(*pairs)
        headline[f"added_gain_{name}"] = headline_number(found.mean, "share of episodes")
        if found.low is None or found.high is None:
            continue
        headline[f"added_gain_{name}_low"] = headline_number(found.low, "share of episodes")
        headline[f"added_gain_{name}_high"] = headline_number(found.high, "share of episodes")
        apart = found.low > 0 or found.high < 0
        verdicts.append(
            f"{name}: {found.mean:+.3f}, 95 % interval {found.low:+.3f} to {found.high:+.3f}"
            + ("" if apart else ", which holds 0: no difference is shown")
        )
    return headline, "; ".join(verdicts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_scales", description=__doc__)
    parser.add_argument("--updates", type=int, default=40, help="of each run (default: 40)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--alpha", type=int, default=1, help="versions between sampling and training (default: 1)")
    parser.add_argument("--episodes", type=int, default=128, help="held-out episodes of each family (default: 128)")
    parser.add_argument("--report", action="store_true", help="print what is there, run nothing")
    options = parser.parse_args(arguments)
    if options.updates < 2:
        parser.error(f"--updates is {options.updates}; a run needs at least 2")
    config = load_run_file(QUICKSTART)
    runs = RunFile.named(f"reward-scales-{options.updates}-{options.episodes}")
    wanted = [(cell, options.alpha, seed) for seed in options.seeds for cell in CELLS]
    if not options.report:
        train_missing(
            wanted,
            lambda cell: training_of(cell, config.training),
            config,
            options.updates,
            options.episodes,
            runs,
            SCALES,
        )
    done = [run for run in runs.rows() if (run["cell"], run["alpha"], run["seed"]) in wanted]
    headline, verdict = compare(done)
    missing = len(wanted) - len(done)
    record(
        "reward_scales",
        summarise_scales(done),
        headline,
        notes=f"{options.updates} updates at alpha {options.alpha}, seeds {options.seeds}, held-out {options.episodes} "
        f"episodes a family. What task normalisation adds: {verdict or 'not known yet'}"
        + (f". {missing} runs are missing: run the command again" if missing else ""),
    )


if __name__ == "__main__":
    main()
