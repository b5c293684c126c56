"""How much does trajectory-level asynchrony save when environments answer at their own pace?

    python -m benchmarks.rollout_async [--trajectories 256] [--slots 16] [--repetitions 3] [--sigmas 1 3 5 10]

256 trajectories of 10 turns on 16 environment slots (the number of trajectories that are played at once): each turn is
a generation of 1 s and an environment's answer after N(10 s, sigma), not below 0. All seconds, the plane's own windows
included, are scaled by 1/100 and slept on the real control plane in one process: group queue, gate, worker loop,
EnvManagers, proxy, trajectory files, and a simulated engine whose steps do not slow each other down.

A second setting limits the engine instead of the environments: all 256 trajectories at once, at most 64 generations at
a time, seconds scaled by 1/10 (ten times the turns per second would not fit one process).

Trajectory-level stepping (each takes its next turn when it can) beside batch stepping (``rollout.stepping: batch``: all
that are played take it together), in turns, over the same latencies. Bounds are computed from those latencies: no
schedule that keeps to the slots ends before max(all work / slots, all generation / engine slots, longest trajectory),
and any that leaves no environment slot idle while work waits ends by all work / slots + longest trajectory (Graham).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import HeadlineNumber, headline_number, median, record
from benchmarks.simulated_plane import ENVIRONMENT, draw_latency, simulated_plane
from resources.engines.config import EngineConfig
from resources.engines.simulated_config import ScriptedAnswers, SimulatedConfig, SimulatedHardware
from resources.environments.family import FamilyConfig
from resources.environments.seeds import episode_seed
from resources.rollout.config import RolloutConfig
from resources.trajectories.store import read_trajectories

TURNS = 10
GENERATION_S = 1.0
LATENCY_S = 10.0
TOKENS_PER_TURN = 50
FAMILY = "waiting"
NOTES = (
    "In process, one event loop, seconds scaled by 1/100 (1/10 with 64 engine slots). 'over bound' is the measured "
    "time of trajectory-level stepping over the work-conserving lower bound, Graham's upper one beside it. A speedup's "
    "bound is the measured time of batch stepping over that lower bound."
)


@dataclass(frozen=True)
class Setting:
    """Who has few places: environments, or the engine."""

    suffix: str
    slots: int
    """Trajectories that are played at once."""
    engine_slots: int
    scale: float
    """Seconds of the table in one second."""


def engine_config(setting: Setting) -> EngineConfig:
    """Weights are read in 20 ms, arithmetic and KV cost nothing: 50 tokens take 1 s, whoever runs beside them."""
    hardware = SimulatedHardware(
        flops_per_s=1e18, bytes_per_s=1e9, memory_bytes=1e9, bandwidth_efficiency=1.0, compute_efficiency=1.0
    )
    simulated = SimulatedConfig(
        time_scale=setting.scale,
        num_parameters=GENERATION_S / TOKENS_PER_TURN * 1e9 / 2.0,
        kv_bytes_per_token=0.0,
        hardware={"compute": hardware},
        answers=ScriptedAnswers(mean_tokens=TOKENS_PER_TURN),
    )
    return EngineConfig(
        backend="simulated",
        num_slots=setting.engine_slots,
        context_length=1024,
        max_prefill_tokens_per_step=65536,
        simulated=simulated,
    )


def family(setting: Setting, num_trajectories: int, sigma: float) -> FamilyConfig:
    return FamilyConfig(
        environment=ENVIRONMENT,
        arguments={"turns": TURNS, "mean_s": LATENCY_S / setting.scale, "sigma_s": sigma / setting.scale},
        hardware_class="compute",
        groups_per_iteration=num_trajectories,
        group_size=1,
        max_new_tokens=2 * TOKENS_PER_TURN,
        max_concurrent_groups=num_trajectories,
    )


async def play(folder: Path, setting: Setting, num_trajectories: int, sigma: float, stepping: Any, seed: int) -> float:
    """Seconds (unscaled) from the first admission to the last score."""
    rollout = RolloutConfig(
        pipeline="synchronous",
        max_staleness=0,
        minimum_group=1,
        stepping=stepping,
        max_concurrent_trajectories=setting.slots,
        # Windows of the plane, scaled like everything else.
        seal_after_s=0.2 / setting.scale,
        done_window_s=0.005 / setting.scale,
    )
    families, engine = {FAMILY: family(setting, num_trajectories, sigma)}, engine_config(setting)
    async with simulated_plane(folder, families, rollout, engine, num_batches=1, seed=seed) as plane:
        started = time.perf_counter()
        batch = await plane.queue.collect(0, 600.0)
        elapsed = time.perf_counter() - started
        rows = read_trajectories(plane.store, [member.ref for group in batch.groups for member in group.members])
        assert len(rows) == num_trajectories and all(len(row.turns) == TURNS for row in rows)
    return elapsed * setting.scale


def bounds(setting: Setting, num_trajectories: int, sigma: float, seed: int) -> tuple[float, float]:
    """(no schedule ends before, any that leaves no environment slot idle ends by), seconds unscaled."""
    lengths = []
    for index in range(num_trajectories):
        of_episode = episode_seed(seed, FAMILY, index, "train")
        latencies = [draw_latency(of_episode, turn, LATENCY_S, sigma) for turn in range(TURNS)]
        lengths.append(sum(latencies) + TURNS * GENERATION_S)
    share = sum(lengths) / setting.slots
    generation = num_trajectories * TURNS * GENERATION_S / setting.engine_slots
    return max(share, generation, max(lengths)), share + max(lengths)


def measure(
    setting: Setting, num_trajectories: int, repetitions: int, sigmas: list[float]
) -> tuple[list[dict[str, Any]], dict[str, HeadlineNumber]]:
    rows: list[dict[str, Any]] = []
    headline: dict[str, HeadlineNumber] = {}
    for sigma in sigmas:
        times: dict[str, list[float]] = {"trajectory": [], "batch": []}
        limits = []
        for seed in range(repetitions):
            for stepping, measured in times.items():
                with tempfile.TemporaryDirectory() as folder:
                    took = asyncio.run(play(Path(folder), setting, num_trajectories, sigma, stepping, seed))
                measured.append(took)
            limits.append(bounds(setting, num_trajectories, sigma, seed))
        lower, upper = median([low for low, _ in limits]), median([high for _, high in limits])
        over = [took / low for took, (low, _) in zip(times["trajectory"], limits, strict=True)]
        speedups = [slow / fast for fast, slow in zip(times["trajectory"], times["batch"], strict=True)]
        possible = [slow / low for slow, (low, _) in zip(times["batch"], limits, strict=True)]
        rows.append(
            {
                "slots": setting.slots,
                "engine slots": setting.engine_slots,
                "sigma s": sigma,
                "trajectory-level s": median(times["trajectory"]),
                "batch stepping s": median(times["batch"]),
                "speedup": median(speedups),
                "lower bound s": lower,
                "over bound": median(over),
                # With few engine slots a trajectory may wait in every turn, and this says nothing.
                "Graham upper bound s": upper if setting.engine_slots >= num_trajectories else None,
            }
        )
        headline[f"speedup_sigma_{sigma:g}{setting.suffix}"] = headline_number(median(speedups), "x", median(possible))
    worst = max(row["over bound"] for row in rows)
    headline[f"over_work_conserving_bound{setting.suffix}"] = headline_number(worst, "x", 1.0)
    return rows, headline


def main() -> None:
    parser = argparse.ArgumentParser(description="Trajectory-level asynchrony beside batch stepping")
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[1.0, 3.0, 5.0, 10.0])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    headline: dict[str, HeadlineNumber] = {}
    for setting in (
        Setting("", arguments.slots, 4096, 100.0),
        Setting("_64_engine_slots", arguments.trajectories, 64, 10.0),
    ):
        more, numbers = measure(setting, arguments.trajectories, arguments.repetitions, arguments.sigmas)
        rows += more
        headline |= numbers
    record("rollout_async", rows, headline, notes=NOTES)


if __name__ == "__main__":
    main()
