"""A ledger behind two tools: look up both accounts, then answer their sum."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from resources.environments.base import Message, StepOutcome
from resources.environments.tools.tool_calls import Tool
from resources.environments.tools.tool_environment import ToolEnvironment, ToolError

NAMES = ("ann", "bob", "eve", "kim", "leo", "mia")


class Ledger(ToolEnvironment):
    """Reward 1 for the right sum. The balances are known to the tool alone, so that the policy has to call it."""

    env_version = "1"
    declares_tools = False  # the opening says it in fewer tokens
    tools = (
        Tool(
            "balance",
            "Balance of an account",
            {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        ),
    )

    def __init__(self, max_turns: int = 3, largest: int = 4) -> None:
        if max_turns < 2:
            raise ValueError(f"ledger: max_turns is {max_turns}; a lookup and an answer need at least 2")
        self.max_turns, self._largest = max_turns, largest

    def start(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        self._wanted = rng.sample(NAMES, 2)
        self._balances = {name: rng.randint(0, self._largest) for name in NAMES}
        self._looked_up: set[str] = set()
        return [
            Message(role="system", content='<tool_call>{"name": "balance", "arguments": {"name": "ann"}}</tool_call>'),
            Message(role="user", content=f"{self._wanted[0]} + {self._wanted[1]}"),
        ]

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        account = arguments["name"]
        if account not in self._balances:
            raise ToolError("no such account")
        self._looked_up.add(account)
        return str(self._balances[account])

    def answer(self, content: str) -> StepOutcome:
        solved = content == str(self._sum())
        return StepOutcome([], reward=float(solved), terminated=True, success=solved)

    def expert_action(self) -> str:
        """Both lookups in one turn, then the sum."""
        missing = [name for name in self._wanted if name not in self._looked_up]
        return "".join(map(_call, missing)) or str(self._sum())

    def random_action(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return _call(rng.choice(NAMES))
        return str(rng.randint(0, 2 * self._largest))

    def _sum(self) -> int:
        return sum(self._balances[name] for name in self._wanted)


def _call(name: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'balance', 'arguments': {'name': name}})}</tool_call>"
