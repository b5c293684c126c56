"""Code repair: a wrong one-line function and a failing visible test; the verdict comes from hidden tests on the reward
pool.

No function is named as a builtin that its right body calls (``def max(a,b): return max(a,b)`` would call itself).
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resources.environments.action_text import malformed, parse_action, tagged
from resources.environments.base import Message, StepOutcome
from resources.sandbox.runner import run_tests_async

MAX_BODY_CHARACTERS = 80
_MAX_OBSERVATION_CHARACTERS = 60
# A second line or a comment is no expression; Python only warns about escapes it does not know and about "1or 2", and
# what a warning does depends on the process.
_NO_BODY = re.compile(r"[\r\n\f#\\]|[0-9][A-Za-z_]")


@dataclass(frozen=True, slots=True)
class Problem:
    """One function of two integers."""

    name: str
    right: str
    compute: Callable[[int, int], int]
    wrong: tuple[tuple[str, Callable[[int, int], int]], ...]
    """Bodies to start from, with what they compute."""


PROBLEMS = (
    Problem("larger", "max(a,b)", max, (("min(a,b)", min), ("a", lambda a, b: a))),
    Problem("smaller", "min(a,b)", min, (("max(a,b)", max), ("b", lambda a, b: b))),
    Problem("total", "a+b", lambda a, b: a + b, (("a-b", lambda a, b: a - b), ("a*b", lambda a, b: a * b))),
    Problem("minus", "a-b", lambda a, b: a - b, (("a+b", lambda a, b: a + b), ("b-a", lambda a, b: b - a))),
    Problem("times", "a*b", lambda a, b: a * b, (("a+b", lambda a, b: a + b), ("a", lambda a, b: a))),
    Problem("gap", "abs(a-b)", lambda a, b: abs(a - b), (("a+b", lambda a, b: a + b), ("a*b", lambda a, b: a * b))),
)
# Fixed pairs: they tell the six right bodies from each other and from every wrong one, and hold nothing that a visible
# test shows (those use 1 to 9).
_HIDDEN_PAIRS = ((11, 4), (3, 12), (10, 10), (-2, 15), (14, -3))


class CodeRepair:
    """Each edit replaces the body and runs the visible test. The episode ends when that passes or the attempts are used
    up (terminated). A malformed action, an edit that is no expression included, costs 0.1 and an attempt."""

    env_version = "1"

    def __init__(self, num_attempts: int = 2, test_deadline_s: float = 2.0) -> None:
        """``test_deadline_s``: longest time of one visible test run, in seconds."""
        if num_attempts < 1:
            raise ValueError(f"code_repair: num_attempts is {num_attempts}; it must be at least 1")
        if not 0 < test_deadline_s <= 60:
            raise ValueError(
                f"code_repair: test_deadline_s is {test_deadline_s}; it must be above 0 and at most 60 seconds"
            )
        self.max_turns, self._test_deadline_s = num_attempts, test_deadline_s

    async def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        self._problem = rng.choice(PROBLEMS)
        self._body, compute_wrong = rng.choice(self._problem.wrong)
        a, b, want, got = _draw_visible_case(rng, self._problem, compute_wrong)
        call = f"{self._problem.name}({a},{b})"
        self._visible_test = f"assert {call} == {want}"
        self._turns = self._num_invalid_actions = 0
        return [
            Message(role="system", content="repair: <edit>expression</edit>"),
            Message(role="user", content=f"{self._code()}\n{call} gave {got}, want {want}"),
        ]

    async def step(self, action: str) -> StepOutcome:
        self._turns += 1
        is_last = self._turns >= self.max_turns
        parsed = parse_action(action, ("edit",))
        if parsed is None or not _is_expression(parsed[1]):
            self._num_invalid_actions += 1
            return malformed("say <edit>expression</edit>", terminated=is_last)
        self._body = parsed[1]
        result = await run_tests_async(self._code(), [self._visible_test], deadline_s=self._test_deadline_s)
        if result.passed or is_last:
            return StepOutcome([], terminated=True, tool_name="visible_test")
        message = result.message[:_MAX_OBSERVATION_CHARACTERS]
        return StepOutcome([Message(role="user", content=message)], tool_name="visible_test")

    async def close(self) -> None:
        pass

    def judgement(self) -> dict[str, Any]:
        """For the scorer ``unit_tests``: the function as last edited, and the hidden tests."""
        name, compute = self._problem.name, self._problem.compute
        tests = [f"assert {name}({a},{b}) == {compute(a, b)}" for a, b in _HIDDEN_PAIRS]
        return {"code": self._code(), "tests": tests, "num_invalid_actions": self._num_invalid_actions}

    def expert_action(self) -> str:
        return tagged("edit", self._problem.right)

    def random_action(self, rng: random.Random) -> str:
        """One of the six right bodies, or the body as it stands."""
        return tagged("edit", rng.choice([*(problem.right for problem in PROBLEMS), self._body]))

    def _code(self) -> str:
        return f"def {self._problem.name}(a,b): return {self._body}"


def _draw_visible_case(
    rng: random.Random, problem: Problem, compute_wrong: Callable[[int, int], int]
) -> tuple[int, int, int, int]:
    """Arguments 1 to 9 on which the wrong body differs, what is wanted, what it gives."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10) if compute_wrong(a, b) != problem.compute(a, b)]
    a, b = rng.choice(pairs)
    return a, b, problem.compute(a, b), compute_wrong(a, b)


def _is_expression(text: str) -> bool:
    if not text or len(text) > MAX_BODY_CHARACTERS or _NO_BODY.search(text):
        return False
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True
