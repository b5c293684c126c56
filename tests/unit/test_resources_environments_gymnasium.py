"""Environments of gymnasium: what is shown, how they end, what a malformed action is, which spaces can be read."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from resources.environments.adapters.space_text import check_readable, parse_value, plain_text, value_text
from resources.environments.registry import make_environment
from resources.failures import EnvironmentFailure
from tests.adapter_episodes import family, play


def test_taxi_is_shown_as_gymnasium_draws_it_and_its_colours_are_kept() -> None:
    opening, outcomes = play(family("gymnasium", {"id": "Taxi-v4"}), 3, ["<act>south</act>"])
    assert opening[0]["content"] == "answer <act>south</act>, or north, east, west, pickup, dropoff"
    text = opening[1]["content"]
    assert "\x1b" not in text and "[blue:" in text and "[magenta:" in text and "[yellow: ]" in text
    assert outcomes[0].reward == -1 and "(South)" in outcomes[0].observation[0]["content"]


def test_the_ends_of_a_gymnasium_environment_are_kept_apart() -> None:
    lake = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "solved_last_reward": 1}
    way = ["down", "down", "right", "right", "down", "right"]
    _, outcomes = play(family("gymnasium", lake), 0, [f"<act>{action}</act>" for action in way])
    goal = outcomes[-1]
    assert (goal.terminated, goal.truncated, goal.success, goal.reward) == (True, False, True, 1.0)
    _, outcomes = play(family("gymnasium", lake), 0, ["<act>right</act>", "<act>down</act>"])
    hole = outcomes[-1]
    assert (hole.terminated, hole.truncated, hole.success) == (True, False, False)
    _, outcomes = play(family("gymnasium", {**lake, "max_turns": 2}), 0, ["<act>up</act>"] * 2)
    limit = outcomes[-1]
    assert (limit.terminated, limit.truncated, limit.success, limit.observation) == (False, True, False, [])
    # gymnasium's own time limit
    lake["kwargs"] = {"is_slippery": False, "max_episode_steps": 1}
    _, outcomes = play(family("gymnasium", {**lake, "max_turns": 5}), 0, ["<act>up</act>"])
    assert (outcomes[-1].terminated, outcomes[-1].truncated) == (False, True)


@pytest.mark.parametrize("action", ["east", "<act>fly</act>", "", "<act></act>", "<act>east</act> so", "<act>2</act>"])
def test_a_malformed_action_is_an_observation_and_costs_a_turn(action: str) -> None:
    _, outcomes = play(family("gymnasium", {"id": "Taxi-v4", "max_turns": 2}), 3, [action, action])
    first, last = outcomes
    assert first.invalid_action and first.reward == -0.1
    assert first.observation[0]["content"].startswith("error: say <act>")
    assert last.truncated and last.observation == []


def test_values_of_every_space_read_as_text_and_come_back() -> None:
    space = spaces.Dict(
        {
            "at": spaces.Box(-9, 9, (2, 2), np.float32),
            "cards": spaces.Tuple([spaces.Discrete(5), spaces.MultiBinary(3)]),
            "say": spaces.Text(8),
        }
    )
    check_readable(space)
    value = {"at": np.array([[1.25, -2], [0.333333, 8]], np.float32), "cards": (3, np.array([1, 0, 1])), "say": "hi"}
    assert value_text(space, value) == "at: 1.25 -2\n0.333 8\ncards: 3 1 0 1\nsay: hi"
    box = spaces.Box(-1, 1, (2,), np.float32)
    assert parse_value(box, "[0.5, -1]").tolist() == [0.5, -1]
    assert parse_value(spaces.MultiDiscrete([3, 4]), "[2, 3]").tolist() == [2, 3]
    assert parse_value(spaces.Text(8), "hello") == "hello"
    for wrong in ("[0.5]", "[0.5, 2]", "[0.5, null]", "nonsense", '{"a":', "[NaN, 0]"):
        with pytest.raises(ValueError, match=r"Box"):
            parse_value(box, wrong)
    with pytest.raises(ValueError, match="MultiDiscrete"):
        parse_value(spaces.MultiDiscrete([3, 4]), "[2, 3.5]")
    with pytest.raises(ValueError, match="at most 64"):
        check_readable(spaces.Box(0, 255, (84, 84, 3), np.uint8))
    assert plain_text("\n\x1b[41mS\x1b[0mFF\n") == "[S]FF"


class Pointer(gymnasium.Env[Any, Any]):
    """Wants the point that it shows."""

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (2,), np.float64)
    action_space = spaces.Box(-1, 1, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._goal = self.np_random.uniform(-1, 1, 2).round(2)
        return self._goal, {}

    def step(self, action: Any) -> Any:
        if (action == 1).all():
            raise OSError("the motor is gone")
        distance = float(abs(action - self._goal).sum())
        return self._goal, -distance, distance < 0.011, False, {"distance": distance}


def shown(environment: gymnasium.Env[Any, Any], observation: Any, info: dict[str, Any]) -> str:
    return f"point {observation.tolist()}"


@pytest.fixture
def pointer() -> Any:
    gymnasium.register("rollart/Pointer-v0", entry_point=Pointer, max_episode_steps=3)
    yield {"id": "rollart/Pointer-v0", "solved_total_reward": -0.05}
    del gymnasium.registry["rollart/Pointer-v0"]


def test_a_continuous_action_is_json_and_a_function_may_render(pointer: dict[str, Any]) -> None:
    opening, _ = play(family("gymnasium", pointer), 1, [])
    goal = opening[1]["content"]
    assert len(goal.split()) == 2
    config = family("gymnasium", {**pointer, "render": f"{__name__}:shown"})
    opening, outcomes = play(config, 1, [f"<act>[{goal.replace(' ', ', ')}]</act>"])
    assert opening[1]["content"].startswith("point [")
    assert outcomes[0].terminated and outcomes[0].success
    _, (outcome,) = play(config, 1, ["<act>[0, 7]</act>"])
    assert outcome.invalid_action and "not in Box" in outcome.observation[0]["content"]


def test_an_environment_that_raises_is_the_environments_failure(pointer: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFailure, match="step raised OSError: the motor is gone"):
        play(family("gymnasium", pointer), 1, ["<act>[1, 1]</act>"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "Nowhere-v0"}, "gymnasium cannot make 'Nowhere-v0'"),
        ({"id": "Taxi-v4", "kwargs": {"nonsense": 1}}, "gymnasium cannot make 'Taxi-v4' with .*nonsense"),
        ({"id": "CliffWalking-v1"}, "registered without a time limit; set max_turns"),
        ({"id": "Taxi-v4", "actions": ["up", "down"]}, "Taxi-v4 has 6 actions"),
        ({"id": "Taxi-v4", "render": "picture"}, "render is 'picture'; it must be auto, ansi"),
        ({"id": "Taxi-v4", "render": "no.module:x"}, "render is 'no.module:x'; its module does not import"),
        ({"id": "CartPole-v1", "render": "ansi"}, "no such render mode"),
        ({"id": "Pendulum-v1", "actions": ["left", "right"]}, "leave it out"),
    ],
)
def test_what_gymnasium_cannot_play_is_said_when_it_is_loaded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_environment(family("gymnasium", arguments))
