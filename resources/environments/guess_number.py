"""A guessing game: find the hidden number; after each wrong guess the environment names the range that remains."""

from __future__ import annotations

import random

from resources.environments.action_text import malformed, parse_action, tagged
from resources.environments.base import Message, StepOutcome


class GuessNumber:
    """Reward 1 for the right number. The guesses are the game's own budget: using them up loses (terminated, not
    truncated). A malformed action or a number outside the game costs 0.1 and a guess."""

    env_version = "1"

    def __init__(self, highest: int = 7, num_guesses: int = 3) -> None:
        """With ``highest < 2 ** num_guesses`` halving the range always wins. Ranges of two digits are hard to learn."""
        if highest < 2:
            raise ValueError(f"guess_number: highest is {highest}; it must be at least 2")
        if num_guesses < 1 or highest >= 2**num_guesses:
            raise ValueError(
                f"guess_number: {num_guesses} guesses cannot find every number up to {highest}; "
                f"num_guesses must be at least {highest.bit_length()}"
            )
        self._highest, self.max_turns = highest, num_guesses

    async def reset(self, seed: int) -> list[Message]:
        self._number = random.Random(seed).randint(1, self._highest)
        self._from, self._to = 1, self._highest
        self._turns = 0
        return [
            Message(role="system", content="guess: <answer>number</answer>"),
            Message(role="user", content=f"{self._from} to {self._to}"),
        ]

    async def step(self, action: str) -> StepOutcome:
        self._turns += 1
        is_last = self._turns >= self.max_turns
        parsed = parse_action(action, ("answer",))
        # isascii: int() would take digits of other scripts, which no tokenizer keeps single
        number = int(parsed[1]) if parsed and parsed[1].isascii() and parsed[1].isdigit() and len(parsed[1]) < 10 else 0
        if not 1 <= number <= self._highest:
            return malformed(
                f"say <answer>number</answer>, {self._from} to {self._to}",
                terminated=is_last,
                success=False if is_last else None,
            )
        if number == self._number:
            return StepOutcome([], reward=1.0, terminated=True, success=True, components={"outcome": 1.0})
        if number < self._number:
            direction, self._from = "higher", max(self._from, number + 1)
        else:
            direction, self._to = "lower", min(self._to, number - 1)
        if is_last:
            return StepOutcome([], terminated=True, success=False, components={"outcome": 0.0})
        return StepOutcome([Message(role="user", content=f"{direction} {self._from} to {self._to}")])

    async def close(self) -> None:
        pass

    def judgement(self) -> None:
        """The environment knows the outcome."""
        return None

    def expert_action(self) -> str:
        """The middle of the remaining range."""
        return tagged("answer", str((self._from + self._to) // 2))

    def random_action(self, rng: random.Random) -> str:
        """Any number of the game, the excluded ones as well."""
        return tagged("answer", str(rng.randint(1, self._highest)))
