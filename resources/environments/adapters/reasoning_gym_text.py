"""reasoning-gym's procedural problems (reasoning-gym 0.1): one question, one answer, scored by the dataset itself."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from typing import Any

from resources.environments.action_text import malformed, parse_action, tagged
from resources.environments.adapters.packages import adapter_version, import_optional
from resources.environments.base import Message, StepOutcome
from resources.environments.seeds import narrow_seed


class ReasoningGymProblem:
    """The answer is ``<answer>...</answer>`` and ends the episode; the reward is ``score_answer``, from 0 to 1. Other
    text is malformed: it costs 0.1, and a turn when ``max_turns`` allows another. The expert gives the dataset's own
    answer."""

    def __init__(
        self,
        dataset: str,
        options: Mapping[str, Any] | None = None,
        max_turns: int = 1,
        instruction: str = "answer <answer>...</answer>",
        solved_score: float = 1.0,
    ) -> None:
        """
        Args:
            dataset: its registered name, such as ``chain_sum``.
            options: of the dataset's configuration (``{min_terms: 2}``), without ``seed`` and ``size``.
            solved_score: a score of at least this is success.

        Raises ValueError for an unknown dataset or option.
        """
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
        self._dataset, self._options = dataset, json.dumps(dict(options or {}))
        _problem(dataset, self._options, 0)
        self.max_turns, self._instruction, self._solved_score = max_turns, instruction, solved_score
        self.env_version = adapter_version("1", "reasoning-gym")

    def reset(self, seed: int) -> list[Message]:
        self._problems, self._entry = _problem(self._dataset, self._options, narrow_seed(seed))
        self._turns = 0
        return [
            Message(role="system", content=self._instruction),
            Message(role="user", content=str(self._entry["question"]).strip()),
        ]

    def step(self, action: str) -> StepOutcome:
        self._turns += 1
        is_last = self._turns >= self.max_turns
        parsed = parse_action(action, ("answer",))
        if parsed is None:
            return malformed("say <answer>...</answer>", truncated=is_last, success=False if is_last else None)
        score = float(self._problems.score_answer(answer=parsed[1], entry=self._entry))
        return StepOutcome(
            [], reward=score, terminated=True, success=score >= self._solved_score, components={"outcome": score}
        )

    def expert_action(self) -> str:
        return tagged("answer", str(self._entry["answer"]))

    def random_action(self, rng: random.Random) -> str:
        """The answer to another problem of the dataset."""
        _, other = _problem(self._dataset, self._options, rng.getrandbits(30))
        return tagged("answer", str(other["answer"]))


@functools.lru_cache(maxsize=1024)  # the siblings of a group get the same problem
def _problem(dataset: str, options: str, seed: int) -> tuple[Any, Mapping[str, Any]]:
    """(the dataset of one problem, its entry)"""
    package = import_optional("reasoning_gym", "reasoning_gym")
    try:
        problems = package.create_dataset(dataset, **{**json.loads(options), "seed": seed, "size": 1})
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym cannot make {dataset!r} with {options} ({error})") from error
    return problems, problems[0]
