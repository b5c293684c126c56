"""Episodes of environments behind an adapter, played from a list of actions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from resources.environments.base import Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.environments.processes import ChildProcesses
from resources.environments.registry import make_environment


def family(environment: str, arguments: dict[str, Any], **settings: Any) -> FamilyConfig:
    return FamilyConfig(environment=environment, arguments=arguments, hardware_class="compute", **settings)


async def episode(
    config: FamilyConfig, seed: int, actions: Sequence[str], children: ChildProcesses | None = None
) -> tuple[list[Message], list[StepOutcome]]:
    environment = make_environment(config, children=children)
    opening = await environment.reset(seed)
    outcomes = []
    for action in actions:
        outcomes.append(await environment.step(action))
        if outcomes[-1].terminated or outcomes[-1].truncated:
            break
    await environment.close()
    return opening, outcomes


def play(config: FamilyConfig, seed: int, actions: Sequence[str]) -> tuple[list[Message], list[StepOutcome]]:
    return asyncio.run(episode(config, seed, actions))
