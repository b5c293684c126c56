"""Environments that are slow the way machines are: latencies from one seed, and fail-slow faults, alone or by group.

A *world* holds the latencies of every environment that a batch may start, so that every configuration of the benchmark
meets the same ones, and the time a perfect scheduler needs follows from them exactly.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from resources.environments.base import Message, StepOutcome

NUM_TURNS = 10
LATENCY_S = (10.0, 5.0)
"""Mean and standard deviation of a step, in seconds; below 0 is 0."""
SLOW_SHARE = 0.02
SLOW_FACTOR = 20.0
WANTED = (32, 8)
"""Groups, and members of a group."""


@dataclass
class World:
    """Latencies of one batch that starts ``num_groups`` groups of ``num_members``."""

    model: str
    """``independent``: every environment is slow for itself. ``correlated``: all environments of a group are."""
    num_groups: int
    num_members: int
    seed: int
    time_scale: float = 1.0
    """Simulated seconds in one second of the machine."""
    steps_started: int = 0
    latencies_GMT: np.ndarray = field(init=False)
    """Seconds of every step: groups, members, turns."""
    _groups: dict[int, int] = field(default_factory=dict)
    _members: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.model == "correlated"])
        shape = (self.num_groups, self.num_members)
        latencies = np.maximum(0.0, rng.normal(*LATENCY_S, (*shape, NUM_TURNS)))
        num_faulty = self.num_groups if self.model == "correlated" else shape[0] * shape[1]
        slow = rng.random(num_faulty) < SLOW_SHARE
        # Half of the batches of 32 groups have no slow group at all: what redundancy is for is seen in the others.
        slow[rng.integers(num_faulty)] |= not slow.any()
        slow = slow.reshape(shape) if self.model == "independent" else np.repeat(slow[:, None], shape[1], axis=1)
        self.latencies_GMT = np.where(slow[..., None], SLOW_FACTOR * latencies, latencies)

    def ideal_s(self) -> float:
        """Seconds until the wanted groups are complete when nothing but the environments takes time."""
        groups, members = WANTED
        finished_GM = np.sort(self.latencies_GMT.sum(axis=2), axis=1)
        return float(np.sort(finished_GM[:, members - 1])[groups - 1])

    def seat(self, seed_env: int) -> tuple[int, int]:
        """Place of an environment that is reset with this seed: members of a group share theirs."""
        group = self._groups.setdefault(seed_env, len(self._groups))
        self._members[group] += 1
        return group, self._members[group] - 1


_WORLDS: dict[str, World] = {}
"""Open worlds, by a name that no other run of this process has."""
_NAMES = itertools.count()


def open_world(world: World) -> str:
    name = f"world-{next(_NAMES)}"
    _WORLDS[name] = world
    return name


def close_world(name: str) -> None:
    del _WORLDS[name]


class SlowEnvironment:
    """Ten turns, each as long as its world says. Members succeed in turn, so that no group is without signal."""

    env_version = "1"
    max_turns = NUM_TURNS

    def __init__(self, world: str) -> None:
        self._world = _WORLDS[world]
        self._seat = (0, 0)
        self._turn = 0

    async def reset(self, seed: int) -> list[Message]:
        self._seat = self._world.seat(seed)
        return [{"role": "user", "content": "go"}]

    async def step(self, action: str) -> StepOutcome:
        world, (group, member) = self._world, self._seat
        world.steps_started += 1
        await asyncio.sleep(float(world.latencies_GMT[group, member, self._turn]) / world.time_scale)
        self._turn += 1
        if self._turn < NUM_TURNS:
            return StepOutcome([{"role": "user", "content": "go"}])
        success = member % 2 == 0
        return StepOutcome([], reward=float(success), terminated=True, success=success)

    async def close(self) -> None: ...

    def judgement(self) -> None:
        return None
