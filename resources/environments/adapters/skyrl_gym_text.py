"""SkyRL-Gym's environments (skyrl-gym 0.4), which get their problems from a file: one prompt and its extras a line."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resources.environments.adapters.packages import adapter_version, import_optional
from resources.environments.base import Message, StepOutcome
from resources.environments.seeds import narrow_seed, split_of

Problem = Mapping[str, Any]


class SkyRLGymText:
    """``done`` is read as `terminated`, or as `truncated` when it came with the last of several turns and without
    success. The reward is the environment's own; it does not tell malformed actions from wrong ones."""

    def __init__(
        self,
        id: str,
        problems: str | Sequence[Problem],
        eval_problems: str | Sequence[Problem] | None = None,
        config: Mapping[str, Any] | None = None,
        max_turns: int = 1,
        solved_reward: float = 1.0,
    ) -> None:
        """
        Args:
            id: as registered (``gsm8k``).
            problems: a JSON-lines file, or a list, of ``{"prompt": text or messages, "extras": {...}}``. The seed
                chooses one.
            eval_problems: those of the evaluation; None: the same.
            config: the environment's ``env_config``.
            solved_reward: a last reward of at least this is success.

        Raises ValueError for an unknown id, and for a file or a problem that cannot be read.
        """
        gym = import_optional("skyrl_gym", "skyrl_gym")
        if id not in gym.registry:
            raise ValueError(f"skyrl_gym has no environment {id!r}; it has {sorted(gym.registry)}")
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
        self._id, self._config = id, dict(config or {})
        self._problems = {"train": _read(problems, "problems")}
        self._problems["eval"] = (
            self._problems["train"] if eval_problems is None else _read(eval_problems, "eval_problems")
        )
        self.max_turns, self._solved_reward = max_turns, solved_reward
        self.env_version = adapter_version("1", "skyrl-gym")
        self._environment: Any = None

    def reset(self, seed: int) -> list[Message]:
        gym, omegaconf = (import_optional(module, "skyrl_gym") for module in ("skyrl_gym", "omegaconf"))
        problems = self._problems[split_of(seed)]
        problem = problems[narrow_seed(seed) % len(problems)]
        prompt = problem["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
        extras = {"max_turns": self.max_turns, **json.loads(json.dumps(problem.get("extras", {})))}
        self._turns = 0
        self._environment = gym.make(self._id, env_config=omegaconf.OmegaConf.create(self._config), extras=extras)
        opening, _ = self._environment.init(messages)
        return [Message(role=each["role"], content=each["content"]) for each in opening]

    def step(self, action: str) -> StepOutcome:
        self._turns += 1
        answer = self._environment.step(action)
        done, reward = bool(answer["done"]), float(answer["reward"])
        is_last = self._turns >= self.max_turns
        solved = done and reward >= self._solved_reward
        out_of_turns = is_last and not solved and (not done or self.max_turns > 1)
        over = done or is_last
        observation = [Message(role=each["role"], content=each["content"]) for each in answer["observations"]]
        return StepOutcome(
            [] if over else observation,
            reward=reward,
            terminated=done and not out_of_turns,
            truncated=out_of_turns,
            success=solved if over else None,
        )

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()


def _read(source: str | Sequence[Problem], field: str) -> Sequence[Problem]:
    problems = _read_file(source, field) if isinstance(source, str) else list(source)
    for number, problem in enumerate(problems):
        if not isinstance(problem, Mapping) or not isinstance(problem.get("prompt"), str | list):
            raise ValueError(
                f"{field}[{number}] is {str(problem)[:80]!r}; it must be "
                "{'prompt': text or messages, 'extras': {...}}"
            )
    if not problems:
        raise ValueError(f"{field} is empty; it needs at least one problem")
    return problems


@functools.lru_cache(maxsize=16)  # thousands of environments read one file
def _read_file(path: str, field: str) -> list[Problem]:
    try:
        return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{field} is {path!r}, which cannot be read as JSON lines ({error})") from error
