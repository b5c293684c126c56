"""What do redundant groups and members save when environments fail slow, and what do they cost in environment steps?

`python -m benchmarks.redundancy [--seeds 3] [--time-scale 20]`: batches of 32 groups of 8, ten turns of N(10 s, 5 s)
each (after ROLL Flash, arXiv 2510.11345), 2 % of the environments 20 times slower, each for itself or a whole group at
once, at least one. The real gate, group queue, rollout worker and proxy run over a simulated engine; only time is
scaled. ``bound``: the same ratio for a scheduler that takes no time and an engine that answers at once, from the same
latencies. ``expected``: that ratio of means over 1,000 draws. With a larger time scale the turns come faster than one
core carries them, which the column ``over_ideal`` shows.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import headline_number, median, record
from benchmarks.redundancy_faults import NUM_TURNS, WANTED, World, close_world, open_world
from resources.engines.actor import EngineActor
from resources.engines.config import EngineConfig
from resources.engines.simulated import SimulatedEngine
from resources.engines.simulated_config import SimulatedConfig
from resources.environments.family import FamilyConfig
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy
from resources.rollout.config import RolloutConfig
from resources.rollout.group_queue import GroupQueue
from resources.rollout.worker import RolloutWorker

CONFIGURATIONS = ((32, 8), (36, 8), (32, 9), (36, 9), (32, 12))
MODELS = ("independent", "correlated")
NUM_DRAWS = 1000
TIMEOUT_S = 600.0
RUN = "redundancy"


class OnePolicy:
    """The engine's only version: a directory with its configuration."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def policy_directory(self, version: int) -> Path:
        return self._directory


class OnLoop:
    """An actor's stand-in: its methods run on the event loop that it belongs to, whoever calls them."""

    def __init__(self, actor: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._actor, self._loop = actor, loop

    def __getattr__(self, method: str) -> Any:
        async def run(*arguments: Any, **named: Any) -> Any:
            coroutine = getattr(self._actor, method)(*arguments, **named)
            if asyncio.get_running_loop() is self._loop:
                return await coroutine
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

        return run


async def play_batch(world: World, policy: Path, store: str) -> float:
    """Seconds of the world from the first start to the complete batch."""
    name, loop = open_world(world), asyncio.get_running_loop()
    groups, members = WANTED
    family = FamilyConfig(
        environment="benchmarks.redundancy_faults:SlowEnvironment",
        arguments={"world": name},
        hardware_class="compute",
        groups_per_iteration=groups,
        group_size=members,
        redundant_groups=world.num_groups - groups,
        redundant_members=world.num_members - members,
        max_new_tokens=16,
        step_deadline_s=TIMEOUT_S,
    )
    config = RolloutConfig(pipeline="synchronous", max_staleness=0, stall_limit_s=TIMEOUT_S)
    engine_config = EngineConfig(
        backend="simulated", num_slots=512, simulated=SimulatedConfig(time_scale=world.time_scale)
    )
    engine = EngineActor.around(SimulatedEngine("compute-0", "compute", OnePolicy(policy), 0, engine_config))
    queue = GroupQueue(RUN, store, {"slow": family}, config, world.seed, num_batches=1)
    worker = await asyncio.to_thread(
        RolloutWorker,
        "w0",
        RUN,
        store,
        OnLoop(queue, loop),
        {"compute": [("compute-0", OnLoop(engine, loop))]},
        {"slow": family},
        config,
        policy_directory=str(policy),
    )
    started = time.perf_counter()
    try:
        batch = await queue.collect(0, TIMEOUT_S)
        took_s = (time.perf_counter() - started) * world.time_scale
        assert len(batch.groups) == groups and all(len(group.members) == members for group in batch.groups)
        return took_s
    finally:
        await queue.close()
        await worker.close()
        await engine.close()
        close_world(name)


def expected_s(model: str, num_groups: int, num_members: int) -> float:
    """Mean time of a perfect scheduler."""
    draws = (World(model, num_groups, num_members, seed).ideal_s() for seed in range(NUM_DRAWS))
    return statistics.fmean(draws)


def measure(model: str, shape: tuple[int, int], seeds: int, time_scale: float, policy: Path) -> dict[str, Any]:
    taken, ideal, steps = [], [], []
    for seed in range(seeds):
        world = World(model, *shape, seed, time_scale)
        with tempfile.TemporaryDirectory() as store:
            took_s = asyncio.run(play_batch(world, policy, f"file://{store}"))
        taken.append(took_s)
        ideal.append(world.ideal_s())
        steps.append(world.steps_started)
        print(f"{model} {shape[0]}x{shape[1]} seed {seed}: {took_s:.0f} s, ideal {ideal[-1]:.0f} s", flush=True)
    wanted_steps = WANTED[0] * WANTED[1] * NUM_TURNS
    return {
        "faults": model,
        "started": f"{shape[0]}x{shape[1]}",
        "batch_s": median(taken),
        "ideal_s": median(ideal),
        "expected_s": expected_s(model, *shape),
        "over_ideal": median([took / best for took, best in zip(taken, ideal, strict=True)]),
        "extra_steps_share": median(steps) / wanted_steps - 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="batches of each configuration")
    parser.add_argument("--time-scale", type=float, default=20.0, help="simulated seconds in a second")
    arguments = parser.parse_args()
    rows = []
    headline = {}
    with tempfile.TemporaryDirectory() as folder:
        policy = create_tiny_policy(Path(folder), PolicyConfig(), ["go", "0123456789"], seed=0)
        for model in MODELS:
            of_model = [
                measure(model, shape, arguments.seeds, arguments.time_scale, policy) for shape in CONFIGURATIONS
            ]
            base = of_model[0]
            for row in of_model:
                row["speedup"] = base["batch_s"] / row["batch_s"]
                row["speedup_bound"] = base["ideal_s"] / row["ideal_s"]
                row["speedup_expected"] = base["expected_s"] / row["expected_s"]
            rows += of_model
            by_shape = dict(zip(CONFIGURATIONS, of_model, strict=True))
            for what, shape in (("groups", (36, 8)), ("members", (32, 9)), ("both", (36, 9))):
                row = by_shape[shape]
                headline[f"speedup_extra_{what}_{model}"] = headline_number(row["speedup"], "x", row["speedup_bound"])
                headline[f"extra_steps_{what}_{model}"] = headline_number(row["extra_steps_share"], "of wanted steps")
    notes = (
        f"{arguments.seeds} batches each, {arguments.time_scale:g} simulated seconds a second. Extra steps: "
        f"environment steps started beyond {WANTED[0] * WANTED[1] * NUM_TURNS} until the batch was complete."
    )
    record("redundancy", rows, headline, notes=notes)


if __name__ == "__main__":
    main()
