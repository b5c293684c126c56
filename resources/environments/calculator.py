"""Arithmetic with a calculator tool: call the tool, read its result, answer. The answer is judged on the reward
pool."""

from __future__ import annotations

import ast
import random
import re
from typing import Any

from resources.environments.action_text import malformed, parse_action, tagged
from resources.environments.base import Message, StepOutcome

_OPERATORS = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult}
_MAX_EXPRESSION_CHARACTERS = 40
_ARITHMETIC = re.compile(r"[0-9+\-*() ]+")


class Calculator:
    """A two-digit number, an operator, a one-digit number. An answer ends the episode (terminated); without one the
    turn limit does (truncated). A malformed action, a tool call that is no arithmetic included, costs 0.1 and a
    turn."""

    env_version = "1"

    def __init__(self, max_turns: int = 3, operators: str = "+-*") -> None:
        if max_turns < 2:
            raise ValueError(f"calculator: max_turns is {max_turns}; a call and an answer need at least 2")
        if not operators or set(operators) - set(_OPERATORS):
            raise ValueError(f"calculator: operators is {operators!r}; it must be some of {''.join(_OPERATORS)!r}")
        self.max_turns, self._operators = max_turns, operators

    async def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        self._question = self._draw_expression(rng)
        self._expected = str(evaluate(self._question))
        self._result_seen = False
        self._answer: str | None = None
        self._turns = self._num_invalid_actions = 0
        return [
            Message(role="system", content="math: <tool>expression</tool> then <answer>number</answer>"),
            Message(role="user", content=self._question),
        ]

    async def step(self, action: str) -> StepOutcome:
        self._turns += 1
        is_last = self._turns >= self.max_turns
        tag, body = parse_action(action, ("tool", "answer")) or ("", "")
        if tag == "tool":
            result = evaluate(body)
            if result is None:
                return self._malformed("no expression such as 47*6", is_last, role="tool")
            self._result_seen |= str(result) == self._expected
            observation = [] if is_last else [Message(role="tool", content=str(result))]
            return StepOutcome(observation, truncated=is_last, tool_name="calculator")
        if tag == "answer" and _is_integer(body):
            self._answer = str(int(body))
            return StepOutcome([], terminated=True)
        return self._malformed("say <tool>expression</tool> or <answer>number</answer>", is_last)

    async def close(self) -> None:
        pass

    def judgement(self) -> dict[str, Any]:
        """For the scorer ``exact_answer``; the answer is None when none was given."""
        return {
            "answer": self._answer,
            "expected": self._expected,
            "num_invalid_actions": self._num_invalid_actions,
        }

    def expert_action(self) -> str:
        """The tool on the question, then, once the tool has said it, the answer."""
        if self._result_seen:
            return tagged("answer", self._expected)
        return tagged("tool", self._question)

    def random_action(self, rng: random.Random) -> str:
        """A tool call of some expression of the family, or an answer: each operator and the answer equally often."""
        kind = rng.choice([*self._operators, "answer"])
        if kind == "answer":
            return tagged("answer", str(rng.randint(0, 999)))
        return tagged("tool", f"{rng.randint(10, 99)}{kind}{rng.randint(1, 9)}")

    def _draw_expression(self, rng: random.Random) -> str:
        return f"{rng.randint(10, 99)}{rng.choice(self._operators)}{rng.randint(1, 9)}"

    def _malformed(self, error: str, is_last: bool, role: str = "user") -> StepOutcome:
        self._num_invalid_actions += 1
        return malformed(error, role=role, truncated=is_last)


def evaluate(expression: str) -> int | None:
    """Value of an integer expression of + - * and brackets; None when it is anything else (or over 40 characters)."""
    if len(expression) > _MAX_EXPRESSION_CHARACTERS or not _ARITHMETIC.fullmatch(expression):
        return None
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
    raise ValueError("not arithmetic")


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 10
