"""Environments that child processes play in the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

from resources.environments.base import Message, StepOutcome


class Obedient:
    """Does what the action says. ``judgement`` tells about the process."""

    env_version = "7"
    max_turns = 9

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    def reset(self, seed: int) -> list[Message]:
        print("an environment may print")
        if self.greeting == "hang":
            time.sleep(600)
        self.num_steps = 0
        return [Message(role="user", content=f"{self.greeting} {seed}")]

    def step(self, action: str) -> Any:
        self.num_steps += 1
        match action:
            case "hang":
                time.sleep(600)
            case "raise":
                raise LookupError("no such room")
            case "exit":
                os._exit(3)
            case "nonsense":
                return {"observation": 3, "surprise": object()}
            case "no outcome":
                return "done"
            case "start":
                child = subprocess.Popen(["sleep", "600"])
                return StepOutcome([Message(role="user", content=str(child.pid))])
            case "use a signal":
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # raises unless this is the main thread
        return StepOutcome(
            [Message(role="tool", content=str(self.num_steps), tool_call_id="call_1", name="count")],
            reward=np.float32(0.5),  # pyright: ignore[reportArgumentType]
            terminated=np.bool_(action == "end"),  # pyright: ignore[reportArgumentType]
            components={"half": np.float64(0.5)},
        )

    def judgement(self) -> dict[str, Any]:
        heavy = sorted({"torch", "transformers", "pydantic", "distributed"} & set(sys.modules))
        return {"pid": os.getpid(), "num_steps": self.num_steps, "heavy": heavy}

    def close(self) -> None:
        print("closed")


class Coroutines(Obedient):
    """The same as coroutines."""

    async def reset(self, seed: int) -> list[Message]:
        return super().reset(seed)

    async def step(self, action: str) -> Any:
        return super().step(action)


class NotForChildren(Obedient):
    """Cannot be made in a child process."""

    def __init__(self, maker: int) -> None:
        super().__init__()
        if os.getpid() != maker:
            raise OSError("no data in this process")
