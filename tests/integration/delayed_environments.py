"""Built-in environments that take their time: as long as the machine's own randomness wills, whatever the seed, or long
for certain."""

from __future__ import annotations

import asyncio
import random

from resources.environments.calculator import Calculator
from resources.environments.guess_number import GuessNumber

_RANDOM = random.SystemRandom()


class DelayedGuessNumber(GuessNumber):
    async def reset(self, seed):
        await asyncio.sleep(_RANDOM.uniform(0, 0.05))
        return await super().reset(seed)

    async def step(self, action):
        await asyncio.sleep(_RANDOM.uniform(0, 0.05))
        return await super().step(action)


class DelayedCalculator(Calculator):
    async def step(self, action):
        await asyncio.sleep(_RANDOM.uniform(0, 0.05))
        return await super().step(action)


class UnhurriedGuessNumber(GuessNumber):
    """Its groups are the last of their batch. Who asks for actions, as the warm start does, need not wait."""

    _step_s = 2.0

    def expert_action(self):
        self._step_s = 0.0
        return super().expert_action()

    def random_action(self, rng):
        self._step_s = 0.0
        return super().random_action(rng)

    async def step(self, action):
        await asyncio.sleep(self._step_s)
        return await super().step(action)
