"""Which algorithm? Every estimator and every loss on the quickstart policy, at staleness 0 and 2, over several seeds.

    python -m benchmarks.algorithms [--cells NAME ...] [--updates N] [--seeds 0 1 2] [--alphas 0 2] [--report]

A cell is one algorithm; it is trained by `benchmarks.algorithms_loop`, in one process on one thread, from one
warm-started policy. A finished run is appended to a file in the state folder at once, and is never run again:
interrupted, the same command goes on. ``--report`` prints what is there and runs nothing. An estimate of the time that
is left stands before each run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers_spec import PeerSpec
from benchmarks.record import headline_number, record
from flows.config import RunConfig, load_run_file
from resources.object_store import ObjectStore
from resources.state_dir import state_dir
from tasks.training.config import TrainingConfig
from tasks.warm_start.artifact import find_warm_start, warm_start_directory
from tasks.warm_start.digest import warm_start_digest

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "run.yaml"
DEFAULT = "grpo + ppo_clip"
SECONDS_PER_UPDATE = 2.5
"""First guess, before any run has been timed: two cores, one of them used."""
CELLS: Mapping[str, dict[str, Any]] = {
    DEFAULT: {},
    "grpo, batch scaling": {"advantage": {"scaling": "batch"}},
    "dr. grpo": {"advantage": {"scaling": "none"}, "normaliser": "fixed_length", "fixed_length_tokens": 64},
    "grpo, task normalisation": {"advantage": {"normalisation": "family"}},
    "rloo": {"advantage": {"estimator": "rloo"}},
    "reinforce++": {"advantage": {"estimator": "reinforce_plus_plus"}},
    "reinforce++ baseline": {"advantage": {"estimator": "reinforce_plus_plus_baseline"}},
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


class RunFile:
    """Finished runs, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def append(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def summarise_cells(runs: Sequence[Mapping[str, Any]], alphas: Sequence[int]) -> list[dict[str, Any]]:
    """One row a cell: mean and lowest final success over seeds, and collapses, by staleness."""
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
                    f"collapses, alpha {alpha}": f"{sum(run['collapsed'] for run in done)} of {len(done)}",
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


def advice(runs: Sequence[Mapping[str, Any]], alphas: Sequence[int]) -> str:
    """Which cells the figures support: no collapse, and a mean within one standard error of the best. A cell with a
    single seed says nothing."""
    sentences = []
    for alpha in alphas:
        by_cell = {cell: [run for run in runs if run["cell"] == cell and run["alpha"] == alpha] for cell in CELLS}
        stable = {
            cell: done for cell, done in by_cell.items() if len(done) > 1 and not any(run["collapsed"] for run in done)
        }
        if not stable:
            continue
        means = {cell: statistics.mean(run["final_success"] for run in done) for cell, done in stable.items()}
        best = max(means, key=lambda cell: means[cell])
        finals = [run["final_success"] for run in stable[best]]
        error = statistics.stdev(finals) / len(finals) ** 0.5
        level = [cell for cell, mean in means.items() if mean >= means[best] - error]
        verdict = "among them" if DEFAULT in level else "not among them"
        sentences.append(
            f"alpha {alpha}: best {best} ({means[best]:.3f}); within its standard error {error:.3f}: "
            f"{', '.join(level)}; the default is {verdict}"
        )
    return ". ".join(sentences)


def warm_started(config: RunConfig) -> str:
    """The quickstart's warm start, from the store, or trained here (about a minute)."""
    from tasks.warm_start.train import train_warm_start

    assert config.warm_start is not None, "the quickstart has one"
    store = ObjectStore.open(config.store)
    families = dict(config.families)
    digest = warm_start_digest(config.policy, families, config.warm_start, config.seed)
    if find_warm_start(store, digest) is None:
        print("training the warm start", flush=True)
        train_warm_start(config.policy, families, config.warm_start, config.seed, store, lambda *_: None)
    return str(warm_start_directory(store, digest, state_dir() / "benchmarks" / "warm-starts"))


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
    runs = RunFile(state_dir() / "benchmarks" / f"algorithms-{options.updates}-{options.episodes}.jsonl")
    # Seeds outermost: runs that are compared lie next to each other in time, and an interrupted matrix is a fair one.
    wanted = [(cell, alpha, seed) for seed in options.seeds for alpha in options.alphas for cell in options.cells]
    if not options.report:
        _run(wanted, config, options.updates, options.episodes, runs)
    done = [run for run in runs.rows() if (run["cell"], run["alpha"], run["seed"]) in wanted]
    missing = len(wanted) - len(done)
    record(
        "algorithms",
        summarise_cells(done, options.alphas),
        headline_of(done, options.alphas),
        notes=f"{options.updates} updates, seeds {options.seeds}, held-out {options.episodes} episodes a family; "
        f"{len(done)} of {len(wanted)} runs. {advice(done, options.alphas)}"
        + (f". {missing} runs are missing: run the command again" if missing else ""),
    )


def _run(wanted: Sequence[tuple[str, int, int]], config: RunConfig, updates: int, episodes: int, runs: RunFile) -> None:
    from benchmarks.algorithms_loop import run_cell

    finished = {(run["cell"], run["alpha"], run["seed"]) for run in runs.rows()}
    left = [key for key in wanted if key not in finished]
    if not left:
        return
    model = warm_started(config)
    durations = [run["wall_s"] for run in runs.rows()]
    for number, (cell, alpha, seed) in enumerate(left):
        per_run = statistics.median(durations) if durations else SECONDS_PER_UPDATE * updates
        print(
            f"{time.strftime('%H:%M:%S')} {cell}, alpha {alpha}, seed {seed}: run {number + 1} of {len(left)}, about "
            f"{(len(left) - number) * per_run / 60:.0f} min left",
            flush=True,
        )
        spec = PeerSpec(
            model_directory=model,
            output_directory="",
            families=dict(config.families),
            training=training_of(cell, config.training),
            context_length=config.policy.context_length,
            num_updates=updates,
            num_threads=1,
            seed=seed,
            num_evaluation_episodes=episodes,
        )
        began = time.perf_counter()
        result = asyncio.run(run_cell(spec, alpha))
        durations.append(time.perf_counter() - began)
        runs.append(
            {
                "cell": cell,
                "alpha": alpha,
                "seed": seed,
                "updates": updates,
                "wall_s": durations[-1],
                "collapsed": result.collapsed,
                **dataclasses.asdict(result),
            }
        )


if __name__ == "__main__":
    main()
