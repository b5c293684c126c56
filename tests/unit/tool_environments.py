"""Environments with tools that the tests play, here and behind a server, and how they are played."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

from resources.environments.base import Message, StepOutcome
from resources.environments.deadline import DeadlineEnvironment
from resources.environments.threads import DaemonThreads
from resources.environments.tools.tool_calls import Tool
from resources.environments.tools.tool_environment import ToolEnvironment, ToolError, ToolResult

NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Quotients(ToolEnvironment):
    """Wants the quotient of two numbers; `divide` works it out, `give_up` ends the episode."""

    env_version = "3"
    max_turns = 4
    tools = (Tool("divide", "a / b", NUMBERS), Tool("give_up"), Tool("hang"), Tool("break"))

    def __init__(self, largest: int = 9) -> None:
        self._largest = largest
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def start(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        self._b = rng.randint(1, self._largest)
        self._a = self._b * rng.randint(1, self._largest)
        self._answer: str | None = None
        return [
            Message(role="system", content="Be exact."),
            Message(role="user", content=f"What is {self._a} / {self._b}?"),
        ]

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult | str:
        self.calls.append((name, dict(arguments)))
        if name == "give_up":
            return ToolResult("a pity", reward=-1.0, terminated=True, success=False, components={"outcome": -1.0})
        if name == "hang":
            await asyncio.sleep(3600)
        if name == "break":
            raise OSError("the tool is broken")
        if arguments["b"] == 0:
            raise ToolError("division by zero")
        return str(arguments["a"] // arguments["b"])

    def answer(self, content: str) -> StepOutcome:
        if not content:
            return StepOutcome([Message(role="user", content="say a number")])
        self._answer = content
        solved = content == str(self._a // self._b)
        return StepOutcome(
            [], reward=float(solved), terminated=True, success=solved, components={"outcome": float(solved)}
        )

    def judgement(self) -> dict[str, Any]:
        return {"answer": self._answer, "expected": str(self._a // self._b)}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def openai(*calls: tuple[str, str, str], content: str | None = None) -> str:
    """(id, name, arguments as text)"""
    listed = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": text}} for each, name, text in calls
    ]
    return json.dumps({"role": "assistant", "content": content, "tool_calls": listed})


def play(inner: ToolEnvironment, *actions: str, seed: int = 5) -> tuple[list[Message], list[StepOutcome]]:
    async def main() -> tuple[list[Message], list[StepOutcome]]:
        environment = DeadlineEnvironment(
            inner, family="mine", reset_deadline_s=20, step_deadline_s=20, threads=DaemonThreads(1)
        )
        opening = await environment.reset(seed)
        try:
            return opening, [await environment.step(action) for action in actions]
        finally:
            await environment.close()

    return asyncio.run(main())
