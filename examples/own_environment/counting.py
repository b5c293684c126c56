"""An environment of one's own: count from a number to another, one number a turn. Nothing of the system is
subclassed."""

import random

from resources.environments.base import Message, StepOutcome


class Counting:
    """Blocking on purpose (plain ``def``): such an environment runs in a thread, under the same deadlines."""

    env_version = "1"

    def __init__(self, length: int = 3, highest_start: int = 9) -> None:
        if length < 1:
            raise ValueError(f"counting: length is {length}; it must be at least 1")
        self.max_turns = length
        self._highest_start = highest_start

    def reset(self, seed: int) -> list[Message]:
        self._next = random.Random(seed).randint(1, self._highest_start) + 1
        self._turns = 0
        return [Message(role="user", content=f"count on from {self._next - 1}: <answer>number</answer>")]

    def step(self, action: str) -> StepOutcome:
        self._turns += 1
        is_last = self._turns >= self.max_turns
        if not action.startswith("<answer>"):
            # A malformed action is an observation and the next turn, never an exception.
            error = Message(role="user", content="error: say <answer>number</answer>")
            return StepOutcome([] if is_last else [error], reward=-0.1, truncated=is_last, invalid_action=True)
        if action != f"<answer>{self._next}</answer>":
            return StepOutcome([], terminated=True, success=False)
        self._next += 1
        if is_last:
            return StepOutcome([], reward=1.0, terminated=True, success=True)
        return StepOutcome([Message(role="user", content="next")])

    # What follows is optional: with an expert the family takes part in the warm start.
    def expert_action(self) -> str:
        return f"<answer>{self._next}</answer>"

    def random_action(self, rng: random.Random) -> str:
        return f"<answer>{rng.randint(2, self._highest_start + self.max_turns)}</answer>"
