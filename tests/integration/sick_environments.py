"""Guessing games that misbehave when they are told to: a file in a folder is a token, and whoever takes it is sick."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from resources.environments.base import Message, StepOutcome
from resources.environments.guess_number import GuessNumber


def take_token(folder: str, name: str) -> bool:
    """Whether this call got one of the tokens ``<name>-*``."""
    for token in Path(folder).glob(f"{name}-*"):
        try:
            token.unlink()
        except FileNotFoundError:
            continue
        return True
    return False


class HangsInItsThread:
    """Plain methods, which run in threads; a sick ``step`` never returns."""

    env_version = "1"

    def __init__(self, folder: str) -> None:
        self._folder, self._game = folder, GuessNumber()
        self.max_turns = self._game.max_turns

    def reset(self, seed: int) -> list[Message]:
        return asyncio.run(self._game.reset(seed))

    def step(self, action: str) -> StepOutcome:
        if take_token(self._folder, "hang"):
            threading.Event().wait()
        return asyncio.run(self._game.step(action))

    def expert_action(self) -> str:
        return self._game.expert_action()

    def random_action(self, rng) -> str:
        return self._game.random_action(rng)


class BlocksTheLoop(GuessNumber):
    """Coroutines; a sick ``step`` sleeps as only threads may."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    async def step(self, action: str) -> StepOutcome:
        if take_token(self._folder, "block"):
            time.sleep(600)
        return await super().step(action)


def stop_generating(dask_worker) -> list[str]:
    """Run in an engine's worker: its engines answer everything from now on, and generate nothing."""
    stopped = []
    for actor in dask_worker.state.actors.values():
        if type(actor).__name__ == "EngineActor":
            type(actor._engine._stepper).step = lambda stepper: time.sleep(600)
            stopped.append(actor._engine.name)
    return stopped
