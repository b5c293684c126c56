"""One cell of `benchmarks.algorithms`: engine, environments and learner in one process, trained on batches that were
sampled a fixed number of versions ago.

Everything is the system's own (engine, environments, scorers, learner); only what brings them together is not.
Staleness is exact: before the first update ``alpha`` batches are played ahead, then each update plays one batch under
the weights it holds and trains on the oldest.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers_loop import LearnerWeights, Players, Seat
from benchmarks.peers_spec import PeerSpec, summarise
from resources.environments.seeds import episode_seed
from tasks.training.learner import Learner
from tasks.training.row import TrainingRow
from tasks.training.steps import NonFiniteUpdate


@dataclass(frozen=True)
class CellResult:
    start_success: float
    """Held-out, mean over families, of the policy that training starts from."""
    final_success: float
    start_by_family: dict[str, float]
    by_family: dict[str, float]
    """Held-out, after training."""
    lowest_success: float
    """Lowest mean over families of the success while training, over windows of `WINDOW` updates."""
    max_grad_norm: float
    failed: str
    """Why training ended early; empty when it did not."""
    seconds_per_update: float
    mean_lag: float


WINDOW = 4


async def run_cell(spec: PeerSpec, alpha: int, reward_scales: Mapping[str, float]) -> CellResult:
    """Train ``spec.num_updates`` updates at staleness ``alpha`` and evaluate before and after.

    Rewards that are trained on are multiplied by ``reward_scales`` of their family, 1 where it is not named.
    """
    from resources.engines.config import EngineConfig
    from resources.engines.local import LocalEngine

    learner = Learner(
        spec.model_directory, spec.training, seed=spec.seed, threads=spec.num_threads, total_updates=spec.num_updates
    )
    config = EngineConfig(num_slots=spec.trajectories_per_update, context_length=spec.context_length)
    weights = LearnerWeights(spec.model_directory, learner)
    engine = LocalEngine("cell", "cpu", weights, 0, config, threads=spec.num_threads)
    players = Players(spec, engine)
    start = await _held_out(spec, players, "start")
    waiting: deque[list[TrainingRow]] = deque()
    success: list[float] = []
    norms: list[float] = []
    lags: list[float] = []
    failed = ""
    played = 0
    began = time.perf_counter()
    for version in range(spec.num_updates):
        while len(waiting) <= alpha and played < spec.num_updates:
            rows, outcomes = await _play(spec, players, played)
            waiting.append([scaled(row, reward_scales.get(row.family, 1.0)) for row in rows])
            success.append(statistics.mean(summarise(outcomes, 0.0, 0).success.values()))
            played += 1
        try:
            metrics = learner.update(waiting.popleft(), version, num_families=len(spec.families)).metrics
        except NonFiniteUpdate as error:
            failed = str(error)
            break
        norms.append(metrics.get("grad_norm/max", 0.0))
        lags.append(metrics.get("staleness/mean", 0.0))
        await engine.suspend()
        await engine.load(version + 1)
        await engine.resume()
    seconds = (time.perf_counter() - began) / max(1, len(norms))
    final = await _held_out(spec, players, "final")
    await engine.close()
    windows = [statistics.mean(success[i : i + WINDOW]) for i in range(max(1, len(success) - WINDOW + 1))]
    return CellResult(
        start_success=statistics.mean(start.values()),
        final_success=statistics.mean(final.values()),
        start_by_family=start,
        by_family=final,
        lowest_success=min(windows),
        max_grad_norm=max(norms, default=0.0),
        failed=failed,
        seconds_per_update=seconds,
        mean_lag=statistics.mean(lags) if lags else 0.0,
    )


def scaled(row: TrainingRow, factor: float) -> TrainingRow:
    """The row with all its rewards, of the whole and of its parts, multiplied by ``factor``."""
    return replace(
        row,
        reward=None if row.reward is None else row.reward * factor,
        turns=tuple(replace(turn, reward=turn.reward * factor) for turn in row.turns),
        reward_components={name: value * factor for name, value in row.reward_components.items()},
    )


async def _play(spec: PeerSpec, players: Players, batch: int) -> tuple[list[TrainingRow], list[Any]]:
    seats = [
        Seat(name, f"{name}-{batch}-{group}", member, seed)
        for group, (name, seed) in enumerate(spec.groups(batch))
        for member in range(spec.group_size)
    ]
    rows, outcomes = zip(*await players.play_all(seats), strict=True)
    return list(rows), list(outcomes)


async def _held_out(spec: PeerSpec, players: Players, when: str) -> dict[str, float]:
    seats = [
        Seat(name, f"{when}-{name}-{index}", 0, episode_seed(spec.seed, name, index, "eval"))
        for name in spec.families
        for index in range(spec.num_evaluation_episodes)
    ]
    return summarise([outcome for _, outcome in await players.play_all(seats)], 0.0, 0).success
