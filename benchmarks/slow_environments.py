"""The quickstart's environments with latency: every step takes a time drawn from the episode's seed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from resources.environments.base import Message, StepOutcome
from resources.environments.calculator import Calculator
from resources.environments.code_repair import CodeRepair
from resources.environments.frozen_lake import FrozenLake
from resources.environments.guess_number import GuessNumber

SIGMA = 0.5
"""Standard deviation of the logarithm of the latencies, which are lognormal."""


class _Slow:
    """``latency_s``: mean seconds of a step; the other arguments are the environment's own."""

    def __init__(self, latency_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._latency_s = latency_s

    async def reset(self, seed: int) -> list[Message]:
        self._latencies = random.Random(seed)
        return await super().reset(seed)  # pyright: ignore[reportAttributeAccessIssue]

    async def step(self, action: str) -> StepOutcome:
        await asyncio.sleep(self._latency_s * self._latencies.lognormvariate(-(SIGMA**2) / 2, SIGMA))
        return await super().step(action)  # pyright: ignore[reportAttributeAccessIssue]


class SlowFrozenLake(_Slow, FrozenLake): ...


class SlowGuessNumber(_Slow, GuessNumber): ...


class SlowCalculator(_Slow, Calculator): ...


class SlowCodeRepair(_Slow, CodeRepair): ...


SLOW = {
    "frozen_lake": "benchmarks.slow_environments:SlowFrozenLake",
    "guess_number": "benchmarks.slow_environments:SlowGuessNumber",
    "calculator": "benchmarks.slow_environments:SlowCalculator",
    "code_repair": "benchmarks.slow_environments:SlowCodeRepair",
}
"""By the name of the quickstart's environment."""
