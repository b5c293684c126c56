"""Any gymnasium environment as one over text: observations are rendered, tagged action texts are parsed."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from resources.environments.action_text import malformed, parse_action, tagged
from resources.environments.adapters.packages import adapter_version, import_function
from resources.environments.adapters.space_text import check_readable, parse_value, plain_text, value_text
from resources.environments.base import Message, StepOutcome
from resources.environments.seeds import narrow_seed

ACTION_NAMES = {
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "MountainCar": ("left", "none", "right"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""What gymnasium's documentation calls the actions of its own environments, by name without version."""


class GymnasiumText:
    """An action is ``<act>name</act>``; for spaces other than Discrete the tag holds the value as JSON (Text: as is).

    The environment's own ends are kept apart: ``terminated`` and ``truncated`` (gymnasium's time limit, or
    ``max_turns``). A malformed action costs 0.1 and a turn, and the environment never sees it. Subclass it and add
    `expert_action` to take part in the warm start.
    """

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        actions: Sequence[str] | None = None,
        render: str = "auto",
        instruction: str | None = None,
        solved_last_reward: float | None = None,
        solved_total_reward: float | None = None,
    ) -> None:
        """
        Args:
            id: as registered (``Taxi-v4``), or ``package.module:id``, which imports the module first.
            kwargs: of ``gymnasium.make``.
            max_turns: None: the time limit that the id is registered with.
            actions: names of the actions of a Discrete space, in order; None: gymnasium's own, else their numbers.
            render: ``ansi`` (the environment's own), ``observation`` (the observation's value), ``auto`` (ansi where
                the environment has it), or ``package.module:function``, called with (environment, observation, info).
            instruction: the system message; None: one that lists the actions.
            solved_last_reward: an episode that terminates with a last reward of at least this is solved.
            solved_total_reward: an episode whose rewards sum to at least this is solved. With neither it is unknown.

        Raises ValueError for what cannot be made, shown or named.
        """
        self._id, self._kwargs = id, dict(kwargs or {})
        action_space, has_ansi, time_limit = _facts(id, json.dumps(self._kwargs), render == "observation")
        self._function = import_function(render, "render") if ":" in render else None
        if self._function is None and render not in ("auto", "ansi", "observation"):
            raise ValueError(f"render is {render!r}; it must be auto, ansi, observation or 'package.module:function'")
        if render == "ansi" and not has_ansi:
            raise ValueError(f"render is 'ansi', but {id} has no such render mode; use 'observation' or a function")
        self._is_ansi = has_ansi and render in ("auto", "ansi")
        if not self._is_ansi and self._function is None:
            _facts(id, json.dumps(self._kwargs), True)
        if max_turns is None and time_limit is None:
            raise ValueError(f"{id} is registered without a time limit; set max_turns")
        self.max_turns: int = max_turns or time_limit or 0
        self.env_version = adapter_version("1", "gymnasium")
        self._names = _action_names(id, action_space, actions)
        self._action_space = action_space
        self._instruction = instruction or _instruction(self._names, action_space)
        self._solved_last_reward, self._solved_total_reward = solved_last_reward, solved_total_reward
        self.environment: gymnasium.Env[Any, Any] | None = None
        """gymnasium's own, from `reset` to `close`."""

    def reset(self, seed: int) -> list[Message]:
        self.close()
        self.environment = _make(self._id, self._kwargs, "ansi" if self._is_ansi else None)
        observation, info = self.environment.reset(seed=narrow_seed(seed))
        self._turns, self._total = 0, 0.0
        return [
            Message(role="system", content=self._instruction),
            Message(role="user", content=self._text(observation, info)),
        ]

    def step(self, action: str) -> StepOutcome:
        assert self.environment is not None, "reset comes first"
        self._turns += 1
        is_last = self._turns >= self.max_turns
        try:
            value = self._parse(action)
        except ValueError as error:
            return malformed(str(error), truncated=is_last)
        observation, reward, terminated, truncated, info = self.environment.step(value)
        reward, terminated = float(reward), bool(terminated)
        truncated = not terminated and (bool(truncated) or is_last)
        self._total += reward
        over = terminated or truncated
        return StepOutcome(
            [] if over else [Message(role="user", content=self._text(observation, info))],
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            success=self._success(reward, terminated) if over else None,
        )

    def close(self) -> None:
        environment, self.environment = self.environment, None
        if environment is not None:
            environment.close()

    def random_action(self, rng: random.Random) -> str:
        """A uniformly random valid action text."""
        if self._names is not None:
            return tagged("act", rng.choice(self._names))
        self._action_space.seed(rng.getrandbits(31))
        value = self._action_space.sample()
        return tagged("act", value if isinstance(value, str) else json.dumps(_jsonable(value)))

    def _parse(self, action: str) -> Any:
        parsed = parse_action(action, ("act",))
        if parsed is None:
            raise ValueError("say <act>...</act>")
        if self._names is None:
            return parse_value(self._action_space, parsed[1])
        if parsed[1] not in self._names:
            raise ValueError(f"say <act>{self._names[0]}</act>, or {', '.join(self._names[1:])}")
        assert isinstance(self._action_space, spaces.Discrete)
        return int(self._action_space.start) + self._names.index(parsed[1])

    def _text(self, observation: Any, info: Mapping[str, Any]) -> str:
        assert self.environment is not None
        if self._function is not None:
            return str(self._function(self.environment, observation, info))
        if self._is_ansi:
            return plain_text(str(self.environment.render()))
        return value_text(self.environment.observation_space, observation)

    def _success(self, last_reward: float, terminated: bool) -> bool | None:
        if self._solved_total_reward is not None:
            return self._total >= self._solved_total_reward
        if self._solved_last_reward is not None:
            return terminated and last_reward >= self._solved_last_reward
        return None


@functools.lru_cache(maxsize=128)
def _facts(id: str, kwargs: str, shows_observation: bool) -> tuple[spaces.Space[Any], bool, int | None]:
    """(action space, whether it renders as ansi, time limit): found out once, when the run file is read."""
    try:
        environment = _make(id, json.loads(kwargs), None)
    except Exception as error:
        raise ValueError(f"gymnasium cannot make {id!r} with {kwargs} ({type(error).__name__}: {error})") from error
    try:
        if shows_observation:
            check_readable(environment.observation_space)
        has_ansi = "ansi" in environment.metadata.get("render_modes", ())
        time_limit = environment.spec.max_episode_steps if environment.spec is not None else None
        return environment.action_space, has_ansi, time_limit
    except ValueError as error:
        raise ValueError(f"{id}: {error}; use render: ansi, or a function of your own") from error
    finally:
        environment.close()


def _make(id: str, kwargs: Mapping[str, Any], render_mode: str | None) -> gymnasium.Env[Any, Any]:
    # Its checker warns about habits of an environment; in a rollout there is nobody to read that.
    mode = {} if render_mode is None else {"render_mode": render_mode}  # not every environment takes one
    return gymnasium.make(id, disable_env_checker=True, **{**kwargs, **mode})


def _action_names(id: str, space: spaces.Space[Any], given: Sequence[str] | None) -> tuple[str, ...] | None:
    if not isinstance(space, spaces.Discrete):
        if given is not None:
            raise ValueError(f"actions is {list(given)!r}, but the actions of {id} are {space}; leave it out")
        return None
    count = int(space.n)
    name = id.rpartition(":")[2].rpartition("/")[2].rpartition("-v")[0]
    names = tuple(given or ACTION_NAMES.get(name, map(str, range(count))))
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"actions is {list(names)!r}; {id} has {count} actions, each needs a name of its own")
    return names


def _instruction(names: tuple[str, ...] | None, space: spaces.Space[Any]) -> str:
    if names is None:
        return f"answer <act>value</act> with a value of {space}"
    return f"answer <act>{names[0]}</act>" + (f", or {', '.join(names[1:])}" if len(names) > 1 else "")


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _jsonable(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_jsonable(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
