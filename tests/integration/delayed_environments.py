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
    """Its groups are the last of their batch. A process that asks for its expert's actions, as the warm start does,
    waits only once."""

    _is_shown = False

    def expert_action(self):
        type(self)._is_shown = True
        return super().expert_action()

    def random_action(self, rng):
        type(self)._is_shown = True
        return super().random_action(rng)

    async def reset(self, seed):
        await asyncio.sleep(0.0 if self._is_shown else 6.0)  # a loaded machine's flow run begins 3 s after its batch
        return await super().reset(seed)
