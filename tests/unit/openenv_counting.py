"""A counting game behind OpenEnv's own server: ``python -m tests.unit.openenv_counting PORT`` (needs openenv)."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Environment, create_fastapi_app  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.types import Action, Observation, State  # pyright: ignore[reportMissingImports]


class Say(Action):
    message: str
    loud: bool = False


class Heard(Observation):
    text: str


class Counting(Environment):  # pyright: ignore[reportUntypedBaseClass]
    """As `tests.unit.test_resources_environments_openenv.play_counting`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self._next = random.Random(seed).randint(1, 9)
        self._count = 0
        return Heard(text=f"count on from {self._next}")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        if action.message == "break":
            raise OSError("the counter is broken")
        if action.message == "cut":
            return Heard(text="", done=True, reward=0.0, metadata={"truncated": True})
        self._next += 1
        right = action.message == str(self._next)
        self._count += right
        if not right or self._count == 3:
            return Heard(text="", done=True, reward=float(right), metadata={"success": right})
        return Heard(text="louder" if action.loud else "go on", reward=0.1)

    @property
    def state(self) -> State:
        return State(step_count=self._count)


def main() -> None:
    application = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=2)
    uvicorn.run(application, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
