"""The base of environments whose actions are tool calls in OpenAI's function-call form.

| the policy says                                  | it hears                                           | its turn     |
|--------------------------------------------------|----------------------------------------------------|--------------|
| calls that can be made                           | a ``tool`` message each, under the call's id       | as they went |
| a call with unreadable or unfitting arguments    | ``error: ...`` under the call's id                 | malformed    |
| a call of an unknown tool                        | ``error: ...`` under the call's id                 | malformed    |
| a call that its tool refuses (`ToolError`)       | ``error: ...`` under the call's id                 | as they went |
| text without a call                              | what `answer` makes of it                          | as it went   |

A malformed turn costs 0.1 and the episode goes on. Whatever else a tool raises is a failure of the environment.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resources.environments.action_text import INVALID_ACTION_PENALTY
from resources.environments.base import Message, StepOutcome
from resources.environments.tools.tool_calls import (
    Reply,
    Tool,
    ToolCall,
    check_arguments,
    declarations_text,
    parse_reply,
)


class ToolError(Exception):
    """A tool refuses a call for a reason that the policy should read, such as a division by zero."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool says, and what the call did to the episode."""

    content: str
    reward: float = 0.0
    terminated: bool = False
    success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)


class ToolEnvironment(ABC):
    """Subclass it: set `tools`, and write `start`, `call_tool` and, where text alone means more than an answer that
    ends the episode, `answer`. All may be coroutines or plain functions; plain ones must not block (for those, take
    ``executor: process``)."""

    env_version = "1"
    max_turns = 8
    max_calls_per_turn = 8
    """Further ones are answered with an error."""
    tools: Sequence[Tool] = ()
    declares_tools = True
    """Whether the opening begins with the declarations. A template of the policy's own may do it instead."""

    @abstractmethod
    def start(self, seed: int) -> Any:
        """The opening messages of the episode of this seed."""

    @abstractmethod
    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """A `ToolResult`, or its content. ``arguments`` fit the tool's schema. Raises ToolError to refuse."""

    def answer(self, content: str) -> Any:
        """A StepOutcome for text without a call. By default it ends the episode, and a scorer judges it."""
        return StepOutcome([], terminated=True)

    async def reset(self, seed: int) -> list[Message]:
        self._turns = 0
        opening: list[Message] = list(await _awaited(self.start(seed)))
        self._tools = {tool.name: tool for tool in self.tools}
        if not self.declares_tools or not self._tools:
            return opening
        text = declarations_text(list(self._tools.values()))
        if opening and opening[0]["role"] == "system":
            text, opening = f"{opening[0]['content']}\n{text}", opening[1:]
        return [Message(role="system", content=text), *opening]

    async def step(self, action: str) -> StepOutcome:
        self._turns += 1
        reply = parse_reply(action, self._turns - 1)
        outcome = await self._called(reply) if reply.calls else await _awaited(self.answer(reply.content))
        if self._turns >= self.max_turns and not outcome.terminated:
            return dataclasses.replace(outcome, truncated=True)
        return outcome

    async def close(self) -> None:
        """Nothing is open here."""
        return

    async def _called(self, reply: Reply) -> StepOutcome:
        """All calls of a turn, in order: each gets its answer, those after the end of the episode included."""
        observation: list[Message] = []
        components: dict[str, float] = {}
        reward, terminated, is_malformed = 0.0, False, False
        success: bool | None = None
        for index, call in enumerate(reply.calls):
            if terminated:
                observation.append(call.answer("error: the episode is over"))
                continue
            error = check_arguments(call, self._tools)
            if error is None and index >= self.max_calls_per_turn:
                error = f"at most {self.max_calls_per_turn} calls in a turn"
            if error is not None:
                is_malformed = True
                observation.append(call.answer(f"error: {error}"))
                continue
            result = await self._result(call)
            observation.append(call.answer(result.content))
            reward += result.reward
            terminated = result.terminated
            success = success if result.success is None else result.success
            for name, value in result.components.items():
                components[name] = components.get(name, 0.0) + value
        if is_malformed:
            reward += INVALID_ACTION_PENALTY
            components["invalid_action"] = INVALID_ACTION_PENALTY
        return StepOutcome(
            observation,
            reward=reward,
            terminated=terminated,
            success=success,
            invalid_action=is_malformed,
            tool_name=",".join(call.name for call in reply.calls if call.name) or None,
            tool_calls=[call.declaration() for call in reply.calls],
            components=components,
        )

    async def _result(self, call: ToolCall) -> ToolResult:
        try:
            result = await _awaited(self.call_tool(call.name, call.arguments or {}))
        except ToolError as error:
            return ToolResult(f"error: {error}")
        return result if isinstance(result, ToolResult) else ToolResult(str(result))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
