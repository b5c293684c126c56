"""When may a trajectory take its next turn? By itself (the default), or in step with the others of its worker.

``stepping: batch`` is the ablation that trajectory-level asynchrony is measured against (RollArt, arXiv 2512.22560,
section 6.1): a barrier before each generation and one before each step of an environment.

| who waits     | for what                                                     | until, at the latest              |
|---------------|--------------------------------------------------------------|-----------------------------------|
| to step       | every generation under way on its worker                     | the proxy's deadlines             |
| to generate   | every other one on its worker to have its next observation   | those, and of resets and steps    |

A trajectory that ends, fails or is cancelled leaves both barriers; one whose environment hangs leaves at the
environment's own deadline. So a barrier never waits for what has no deadline, and it needs no clock.
"""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

Phase = Literal["environment", "observed", "engine", "answered"]
"""Resetting or stepping; has its observation and waits to generate; generates; has its answer and waits to step."""


class Stepping(Protocol):
    """What a trajectory asks before each of its turns."""

    def join(self, trajectory_id: str) -> None: ...
    def leave(self, trajectory_id: str) -> None: ...
    async def may_generate(self, trajectory_id: str) -> None: ...
    async def may_step(self, trajectory_id: str) -> None: ...


class TrajectoryStepping:
    """Every trajectory takes its turns when it can."""

    def join(self, trajectory_id: str) -> None: ...
    def leave(self, trajectory_id: str) -> None: ...
    async def may_generate(self, trajectory_id: str) -> None: ...
    async def may_step(self, trajectory_id: str) -> None: ...


class BatchStepping:
    """All trajectories that have joined take their turns together. Lives on one event loop; see the module.

    A trajectory that joins while others are in the middle of a turn takes part from their next generation on. Those
    that never joined (evaluation) wait for nobody.
    """

    def __init__(self) -> None:
        self.num_turns = 0
        """Times that the barrier before a generation has opened."""
        self._phases: dict[str, Phase] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def join(self, trajectory_id: str) -> None:
        """Called before the reset."""
        self._phases[trajectory_id] = "environment"

    def leave(self, trajectory_id: str) -> None:
        """However it ended. No-op for one that is not there."""
        if self._phases.pop(trajectory_id, None) is not None:
            self._waiting.pop(trajectory_id, None)
            self._open()

    async def may_generate(self, trajectory_id: str) -> None:
        """Return when every trajectory that has joined has its observation."""
        await self._wait(trajectory_id, "observed")

    async def may_step(self, trajectory_id: str) -> None:
        """Return when no trajectory that has joined is generating."""
        await self._wait(trajectory_id, "answered")

    async def _wait(self, trajectory_id: str, phase: Phase) -> None:
        if trajectory_id not in self._phases:
            return
        self._phases[trajectory_id] = phase
        opened = self._waiting[trajectory_id] = asyncio.get_running_loop().create_future()
        self._open()
        await opened

    def _open(self) -> None:
        phases = set(self._phases.values())
        if phases == {"observed"}:
            self.num_turns += 1
            self._let_through("observed", "engine")
        elif "answered" in phases and "engine" not in phases:
            self._let_through("answered", "environment")

    def _let_through(self, waiting: Phase, then: Phase) -> None:
        for trajectory_id in [key for key, phase in self._phases.items() if phase == waiting]:
            self._phases[trajectory_id] = then
            opened = self._waiting.pop(trajectory_id)
            if not opened.done():  # one that was cancelled this moment leaves by itself
                opened.set_result(None)
