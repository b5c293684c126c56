"""How many trajectories can one process hold, and what does each cost while it waits?

    python -m benchmarks.scale [--trajectories 1000 10000] [--seconds 20]

So many EnvManagers at once in one process, on one event loop, with everything they wait on: group queue, gate, worker
loop, proxy, exchanges, simulated engines, trajectory files. A turn is a generation and an environment's answer. Either
the environment takes its time and generation next to none, or the other way round: the two places where a trajectory
waits, and they hold different things. That time is the number of trajectories over the wanted turns per second, so that
all rows ask for the same load.

Measured over a window in which all are under way: turns per second, and the lag of the event loop (how late a timer of
5 ms fires, 99th percentile). Memory is taken at the end of it: the growth of the resident set, and in a run of its own,
since tracing slows everything, Python's allocations (`tracemalloc`), by module. Both are less the bytes of the
trajectories' tokens themselves. Each row runs in a fresh process.

Prefect has no part in any of this, whatever the number: the driver asserts that the process has not even imported it.
That the task runs of an iteration are the same few is asserted by tests/integration/test_train_simulated.py.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.record import HeadlineNumber, headline_number, record
from benchmarks.simulated_plane import ENVIRONMENT, SimulatedPlane, simulated_plane
from resources.engines.config import EngineConfig
from resources.engines.simulated_config import ScriptedAnswers, SimulatedConfig, SimulatedHardware
from resources.environments.family import FamilyConfig
from resources.rollout.config import RolloutConfig

TURNS_PER_S = 200.0
TURNS = 1000
"""More than are played: nobody ends while it is measured."""
TOKENS_PER_TURN = 8
CONTEXT = 4096
NUM_ENGINES = 4
START_S = 300.0
ROW_S = 1200.0
ALLOWED_BYTES = 16 * 1024
ROOT = Path(__file__).resolve().parent.parent
PLACES = ("environment", "engine")
NOTES = (
    "Bytes beyond a trajectory's own tokens; 'allocated' by tracemalloc, 'resident' by the growth of the resident set. "
    f"The load asked for is {TURNS_PER_S:g} turns/s in every row; a row whose start-up is still going on in its window "
    "shows less. Task runs of Prefect: none (not imported)."
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Concurrent trajectories in one process")
    parser.add_argument("--trajectories", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the measured window")
    parser.add_argument("--row", nargs=3, metavar=("NUMBER", "PLACE", "TRACED"), help="measure one row, print its JSON")
    arguments = parser.parse_args()
    if arguments.row:
        number, place, traced = arguments.row
        print(json.dumps(measure_row(int(number), place, traced == "True", arguments.seconds)))
        return
    rows: list[dict[str, Any]] = []
    headline: dict[str, HeadlineNumber] = {}
    for number in arguments.trajectories:
        for place in PLACES:
            plain = in_fresh_process(number, place, False, arguments.seconds)
            traced = in_fresh_process(number, place, True, arguments.seconds)
            rows.append({**plain, "allocated bytes": traced["allocated bytes"]})
            rows.extend({"waits at": f"  {module}", "allocated bytes": size} for module, size in traced["by module"])
            key = f"{number}_at_{place}"
            headline[f"turns_per_s_{key}"] = headline_number(plain["turns/s"], "turns/s", TURNS_PER_S)
            headline[f"lag_p99_ms_{key}"] = headline_number(plain["lag p99 ms"], "ms")
            headline[f"bytes_{key}"] = headline_number(traced["allocated bytes"], "bytes", ALLOWED_BYTES)
    record("scale", rows, headline, notes=NOTES)


def in_fresh_process(number: int, place: str, traced: bool, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.scale", "--seconds", str(seconds)]
    command += ["--row", str(number), place, str(traced)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ROW_S, check=False, env=os.environ)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_row(number: int, place: str, traced: bool, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as warm, tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(warm), 8, place, False, 0.5))  # imports, caches, code objects
        row = asyncio.run(measure(Path(folder), number, place, traced, seconds))
    assert "prefect" not in sys.modules
    return row


async def measure(folder: Path, number: int, place: str, traced: bool, seconds: float) -> dict[str, Any]:
    period_s = number / TURNS_PER_S
    gc.collect()
    if traced:
        tracemalloc.start()
    before = psutil.Process().memory_info().rss
    families = {"waiting": family(number, period_s if place == "environment" else 0.0)}
    engines = engine_config(number, period_s if place == "engine" else 0.0)
    rollout = RolloutConfig(
        pipeline="synchronous",
        max_staleness=0,
        max_concurrent_trajectories=number,
        worker_timeout_s=120.0,
        generate_deadline_s=600.0,
    )
    lags: list[float] = []
    async with simulated_plane(folder, families, rollout, engines, num_engines=NUM_ENGINES, num_batches=1) as plane:
        started = time.monotonic()
        while plane.worker_loop.stats()["running"] < number:
            assert time.monotonic() - started < START_S, f"not all have started: {plane.worker_loop.stats()}"
            await asyncio.sleep(0.1)
        # Times are widely spread, so that after one turn of each they come evenly.
        await asyncio.sleep(period_s)
        watching = asyncio.ensure_future(watch_lag(lags))
        turns_before, window_started = num_turns(plane), time.monotonic()
        await asyncio.sleep(seconds)
        turns_per_s = (num_turns(plane) - turns_before) / (time.monotonic() - window_started)
        watching.cancel()
        gc.collect()
        tokens = token_bytes(plane)
        resident = psutil.Process().memory_info().rss - before
        row: dict[str, Any] = {
            "trajectories": number,
            "waits at": place,
            "turns/s": turns_per_s,
            "lag p99 ms": 1000.0 * float(np.percentile(lags, 99)),
            "lag max ms": 1000.0 * max(lags),
            "token bytes": tokens / number,
            "resident bytes": (resident - tokens) / number,
            "stages": str(plane.worker_loop.stats()["stages"]),
        }
        if traced:
            row |= by_module(tracemalloc.take_snapshot(), number, tokens)
            tracemalloc.stop()
    return row


def family(number: int, latency_s: float) -> FamilyConfig:
    return FamilyConfig(
        environment=ENVIRONMENT,
        arguments={"turns": TURNS, "mean_s": latency_s, "sigma_s": latency_s},
        hardware_class="compute",
        groups_per_iteration=max(1, number // 8),
        group_size=8,
        max_new_tokens=10 * TOKENS_PER_TURN,
        max_concurrent_groups=number,
        step_deadline_s=600.0,
    )


def engine_config(number: int, generation_s: float) -> EngineConfig:
    """A generation takes so long, however many run; 0: a millisecond."""
    weights_s = max(0.001, generation_s) / TOKENS_PER_TURN
    hardware = SimulatedHardware(flops_per_s=1e24, bytes_per_s=1e9, memory_bytes=1e15, bandwidth_efficiency=1.0)
    simulated = SimulatedConfig(
        num_parameters=weights_s * 1e9 / 2.0,
        kv_bytes_per_token=0.0,
        hardware={"compute": hardware},
        answers=ScriptedAnswers(length="geometric", mean_tokens=TOKENS_PER_TURN),
    )
    slots = min(4096, max(64, number // NUM_ENGINES + number // 8))
    return EngineConfig(
        backend="simulated",
        num_slots=slots,
        context_length=CONTEXT,
        max_prefill_tokens_per_step=2**20,
        simulated=simulated,
    )


async def watch_lag(lags: list[float], period_s: float = 0.005) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period_s
        await asyncio.sleep(period_s)
        lags.append(max(0.0, loop.time() - due))


def num_turns(plane: SimulatedPlane) -> int:
    return sum(len(manager._record.turns) for manager in plane.worker_loop._managers.values())


def token_bytes(plane: SimulatedPlane) -> int:
    """The four lists of every trajectory, as they lie in memory."""
    records = [manager._record.tokens for manager in plane.worker_loop._managers.values()]
    return sum(a.nbytes for r in records for a in (r._ids, r._mask, r._logprobs, r._versions))


def by_module(snapshot: tracemalloc.Snapshot, number: int, tokens: int) -> dict[str, Any]:
    """Bytes a trajectory, in all and by the modules that allocate most (tokens are those of `token_record`)."""
    sizes: dict[str, float] = {}
    for statistic in snapshot.statistics("filename"):
        filename = Path(statistic.traceback[0].filename)
        name = str(filename.relative_to(ROOT)) if filename.is_relative_to(ROOT) else filename.name
        sizes[name] = sizes.get(name, 0.0) + statistic.size / number
    sizes["resources/rollout/token_record.py"] = sizes.get("resources/rollout/token_record.py", 0.0) - tokens / number
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:12]
    return {"allocated bytes": sum(sizes.values()), "by module": largest}


if __name__ == "__main__":
    main()
