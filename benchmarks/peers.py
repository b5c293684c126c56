"""rollart beside TRL's GRPOTrainer and a bare loop: the same families, model, groups and updates, on two cores.

    python -m benchmarks.peers [--model DIR] [--updates N] [--rounds R]

All sides start from one warm-started model directory and train the quickstart's four families (group size 8) with the
run file's optimizer, minibatches and clipping. They run one after another, in rounds, never at once:

- TRL 1.16 in an environment of its own, on one and on two torch threads (what was adapted: `benchmarks.peers_trl`);
- the bare loop, one process without any orchestration, on one and on two torch threads (`benchmarks.peers_loop`);
- rollart as a user starts it: Prefect server, Dask pools, reward replicas, trajectory and weight store, asynchronous.

A rate is trajectories trained from the end of the first update to the end of the last; start-up is a column of its own.
The bound is two perfect cores: twice the bare loop on one thread. Success is held-out, by one evaluator for all sides.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers_sides import (
    measure_peer,
    measure_rollart,
    trl_interpreter,
    warm_started_policy,
)
from benchmarks.peers_spec import PeerResult, PeerSpec
from benchmarks.record import HeadlineNumber, headline_number, median, record
from flows.config import RunConfig, load_run_file, state_dir

NUM_CORES = 2
SIDE_TIMEOUT_S = 900.0
TRL_SIDES = ("trl, 1 thread", "trl, 2 threads")
LOOP_SIDES = ("loop, 1 thread", "loop, 2 threads")
ROLLART = "rollart"
START = "warm start"


@dataclass
class Side:
    """What was measured of one side, over all rounds."""

    results: list[PeerResult] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    success: dict[str, float] = field(default_factory=dict)
    """Held-out, by family, of the policy after the last round."""

    @property
    def trajectories_per_s(self) -> float:
        return median([result.trajectories_per_s() for result in self.results])

    def add(self, measured: tuple[PeerResult, float]) -> None:
        result, wall_s = measured
        self.results.append(result)
        self.wall_s.append(wall_s)


def rows_of(sides: Mapping[str, Side], start_success: Mapping[str, float]) -> list[dict[str, Any]]:
    """One row a side, and one for the policy that all start from. ``start_s``: start-up, first update and end."""
    rows: list[dict[str, Any]] = [{"side": START, **_success_columns(start_success)}]
    for name, side in sides.items():
        rates = [result.trajectories_per_s() for result in side.results]
        seconds = [result.updates[-1].ended_at_s - result.updates[0].ended_at_s for result in side.results]
        rows.append(
            {
                "side": name,
                "trajectories_per_s": median(rates),
                "rounds": " ".join(f"{rate:.1f}" for rate in rates),
                "tokens_per_s": median([result.tokens_per_s() for result in side.results]),
                "start_s": median([wall - steady for wall, steady in zip(side.wall_s, seconds, strict=True)]),
                **_success_columns(side.success),
            }
        )
    return rows


def headline_of(sides: Mapping[str, Side]) -> dict[str, HeadlineNumber]:
    """rollart against TRL's best, and against two perfect cores."""
    best_trl = max(sides[name].trajectories_per_s for name in TRL_SIDES)
    two_perfect_cores = NUM_CORES * sides[LOOP_SIDES[0]].trajectories_per_s
    rollart = sides[ROLLART].trajectories_per_s
    return {
        "trajectories_per_s_vs_trl": headline_number(rollart / best_trl, "x", bound=two_perfect_cores / best_trl),
        "trajectories_per_s": headline_number(rollart, "1/s", bound=two_perfect_cores),
        "trajectories_per_s_vs_loop": headline_number(
            rollart / max(sides[name].trajectories_per_s for name in LOOP_SIDES), "x"
        ),
    }


def _success_columns(success: Mapping[str, float]) -> dict[str, Any]:
    if not success:
        return {}
    by_family = ", ".join(f"{name} {share:.2f}" for name, share in success.items())
    return {"success": sum(success.values()) / len(success), "by_family": by_family}


class Benchmark:
    """Runs every side in a folder of its own."""

    def __init__(self, run_file: Path, model: Path, folder: Path, updates: int, episodes: int) -> None:
        self._run_file, self._model, self._folder = run_file, model, folder
        self._updates, self._episodes = updates, episodes
        self._config: RunConfig = load_run_file(run_file)
        self._trl = trl_interpreter(state_dir() / "envs")

    def spec(self, name: str, num_threads: int, model: Path | str | None = None) -> PeerSpec:
        return PeerSpec(
            model_directory=str(model or self._model),
            output_directory=str(self._folder / f"{name}.policy"),
            families=dict(self._config.families),
            training=self._config.training,
            context_length=self._config.policy.context_length,
            num_updates=self._updates,
            num_threads=num_threads,
            seed=self._config.seed,
            num_evaluation_episodes=self._episodes,
        )

    def round(self, sides: Mapping[str, Side], number: int) -> None:
        """Measure every side once, TRL and rollart apart from each other by the loop."""
        for threads in (1, 2):
            self._say(number, TRL_SIDES[threads - 1])
            sides[TRL_SIDES[threads - 1]].add(
                self._peer(f"trl-{threads}-{number}", self._trl, ["benchmarks.peers_trl"], threads)
            )
            self._say(number, LOOP_SIDES[threads - 1])
            sides[LOOP_SIDES[threads - 1]].add(
                self._peer(f"loop-{threads}-{number}", sys.executable, ["benchmarks.peers_loop", "train"], threads)
            )
        self._say(number, ROLLART)
        sides[ROLLART].add(self._rollart(number))

    def success(self, name: str, model: Path | str) -> dict[str, float]:
        """Held-out success of a policy by family."""
        spec = self.spec(f"evaluate-{name}", 1, model)
        command = ["benchmarks.peers_loop", "evaluate"]
        result, _ = measure_peer(f"evaluate-{name}", sys.executable, command, spec, self._folder, SIDE_TIMEOUT_S)
        return result.held_out_success

    def _peer(self, name: str, python: Path | str, module: Sequence[str], threads: int) -> tuple[PeerResult, float]:
        return measure_peer(name, python, module, self.spec(name, threads), self._folder, SIDE_TIMEOUT_S)

    def _rollart(self, number: int) -> tuple[PeerResult, float]:
        overrides = {
            "name": "peers",
            "num_iterations": str(self._updates),
            "policy.model_directory": str(self._model),
            "warm_start": "null",
            "evaluation.before": "false",
            "evaluation.after": "false",
        }
        store = self._folder / f"store-{number}"
        return measure_rollart(self._run_file, overrides, store, self._folder / f"rollart-{number}.log", SIDE_TIMEOUT_S)

    def _say(self, number: int, side: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} round {number + 1}: {side}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="rollart beside TRL and a bare loop"
    )
    parser.add_argument("--run-file", type=Path, default=Path("examples/quickstart/run.yaml"))
    parser.add_argument("--model", type=Path, help="model directory to start from (default: the run file's warm start)")
    parser.add_argument("--updates", type=int, default=16, help="updates of every side and round (default: 16)")
    parser.add_argument("--rounds", type=int, default=2, help="how often every side runs (default: 2)")
    parser.add_argument("--episodes", type=int, default=128, help="held-out episodes a family (default: 128)")
    options = parser.parse_args(arguments)
    if options.updates < 2:
        parser.error(f"--updates is {options.updates}; a rate needs at least 2")
    # One machine for all sides: two cores, whatever else the machine has. Children inherit it.
    cores = sorted(os.sched_getaffinity(0))[:NUM_CORES]
    os.sched_setaffinity(0, cores)
    folder = state_dir() / "benchmarks" / time.strftime("peers-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    model = options.model or warm_started_policy(options.run_file, folder / "warm-start.log", SIDE_TIMEOUT_S)
    benchmark = Benchmark(options.run_file.absolute(), model.absolute(), folder, options.updates, options.episodes)
    sides = {name: Side() for name in (*TRL_SIDES, *LOOP_SIDES, ROLLART)}
    for number in range(options.rounds):
        benchmark.round(sides, number)
    start = benchmark.success("start", model)
    for number, side in enumerate(sides.values()):
        side.success = benchmark.success(str(number), side.results[-1].model_directory)
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    record(
        "peers",
        rows_of(sides, start),
        headline_of(sides),
        notes=f"Cores {cores}; {options.rounds} rounds, medians; bound: two perfect cores, twice the bare loop on one "
        f"thread. Load averages at the end: {loads}. Files: {folder.name}",
    )


if __name__ == "__main__":
    main()
