"""The environment protocol: one episode at a time, over text."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable


class Message(TypedDict):
    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: str
    name: NotRequired[str]
    """Of a ``tool`` message: the tool."""
    tool_call_id: NotRequired[str]
    """Of a ``tool`` message: the call that it answers."""
    tool_calls: NotRequired[list[dict[str, Any]]]
    """Of an ``assistant`` message: the calls in its text, as in OpenAI's API. ``content`` keeps the whole text."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the environment says after one action."""

    observation: list[Message]
    """Messages to append before the next generation (empty when the episode is over)."""
    reward: float = 0.0
    """Inline reward of this step."""
    terminated: bool = False
    """The task itself ended (solved, failed for good)."""
    truncated: bool = False
    """Ended from outside the task (turn limit)."""
    success: bool | None = None
    """Whether the task is solved, when the environment knows; None when only the reward pool can tell."""
    invalid_action: bool = False
    tool_name: str | None = None
    """Tool that was called (several are joined with commas)."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls found in the action, in OpenAI's form; they are kept beside its text in the trajectory's messages."""
    components: dict[str, float] = field(default_factory=dict)
    """Named parts of ``reward``."""


class Environment(Protocol):
    """One environment instance plays one episode: reset, steps, close. It never knows the policy or the tokenizer.

    Blocking code belongs in a thread: these coroutines share an event loop with hundreds of others.
    """

    env_version: str
    max_turns: int

    async def reset(self, seed: int) -> list[Message]:
        """Start the episode of this seed; the same seed gives the same episode. Returns the opening messages."""
        ...

    async def step(self, action: str) -> StepOutcome:
        """Apply one action (the assistant's text, stop token removed)."""
        ...

    async def close(self) -> None: ...

    def judgement(self) -> dict[str, Any] | Awaitable[dict[str, Any] | None] | None:
        """JSON-able payload for a scorer on the reward pool, once the episode is over; None: the outcome is inline.
        May be a coroutine."""
        ...


@runtime_checkable
class ScriptedExpert(Protocol):
    """What a family offers for the warm start and for the reference rows of a benchmark."""

    def expert_action(self) -> str:
        """The action text a perfect player gives in the current state."""
        ...

    def random_action(self, rng: random.Random) -> str:
        """A uniformly random valid action text."""
        ...
