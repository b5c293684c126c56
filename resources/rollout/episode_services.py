"""What do the trajectories of one worker share?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from resources.engines.base import GenerateRequest, Generation
from resources.environments.base import Environment
from resources.environments.family import FamilyConfig
from resources.rollout.cross_policy import CrossPolicyConfig
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.stepping import Stepping, TrajectoryStepping


class Generator(Protocol):
    """What a trajectory needs of the proxy."""

    async def generate(self, request: GenerateRequest, hardware_class: str) -> Generation: ...
    def release(self, trajectory_id: str) -> None: ...
    def engine_of(self, trajectory_id: str) -> str:
        """Name of the engine that generates for it; empty while none does."""
        ...


@dataclass(frozen=True)
class EpisodeServices:
    """One for all trajectories of a worker: what they encode with, generate on and play in."""

    chat: EncodingCache
    proxy: Generator
    make_environment: Callable[[str, FamilyConfig], Environment]
    """(family name, its configuration) -> a fresh environment whose calls end at their deadlines."""
    context_length: int
    """Tokens of a trajectory, at most."""
    length_finish: str = "end_episode"
    """See `RolloutConfig.length_finish`."""
    history: str = "append"
    """See `RolloutConfig.history`."""
    stepping: Stepping = field(default_factory=TrajectoryStepping)
    """Who takes a turn when; evaluation episodes never wait for others."""
    cross_policy: CrossPolicyConfig | None = None
    """Which turns of training trajectories are stale engines'; None: none."""
    on_first_sampled: Callable[[str, int], None] = lambda trajectory_id, version: None
    """The oldest version of a trajectory's sampled tokens, whenever it becomes known or sinks."""
    log: Callable[[str], None] = lambda line: None
    close_deadline_s: float = 10.0
    unix_time: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    """Environments that are being closed."""
