"""Training runs of `benchmarks.algorithms_loop` that are appended to a file as they end, and never run again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers_spec import PeerSpec
from flows.config import RunConfig
from resources.object_store import ObjectStore
from resources.state_dir import state_dir
from tasks.training.config import TrainingConfig
from tasks.warm_start.artifact import find_warm_start, warm_start_directory
from tasks.warm_start.digest import warm_start_digest

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "run.yaml"
SECONDS_PER_UPDATE = 2.5
"""First guess, before any run has been timed: two cores, one of them used."""


class RunFile:
    """Finished runs, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    @classmethod
    def named(cls, name: str) -> RunFile:
        """In the state folder, where an interrupted benchmark finds it again."""
        return cls(state_dir() / "benchmarks" / f"{name}.jsonl")

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def append(self, row: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


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


def train_missing(
    wanted: Sequence[tuple[str, int, int]],
    training_of: Callable[[str], TrainingConfig],
    config: RunConfig,
    updates: int,
    episodes: int,
    runs: RunFile,
    reward_scales: Mapping[str, float] | None = None,
) -> None:
    """Train what is not in ``runs`` yet of the ``wanted`` (cell, alpha, seed), each for ``updates`` updates.

    Args:
        training_of: the training configuration of a cell.
        episodes: held-out ones of each family, before and after.
        reward_scales: factor on every reward of a family that is trained on; 1 where it is not named.
    """
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
            training=training_of(cell),
            context_length=config.policy.context_length,
            num_updates=updates,
            num_threads=1,
            seed=seed,
            num_evaluation_episodes=episodes,
        )
        began = time.perf_counter()
        result = asyncio.run(run_cell(spec, alpha, reward_scales or {}))
        durations.append(time.perf_counter() - began)
        runs.append(
            {
                "cell": cell,
                "alpha": alpha,
                "seed": seed,
                "updates": updates,
                "wall_s": durations[-1],
                **dataclasses.asdict(result),
            }
        )
