"""Environments of other libraries: each adapter plays a real one, the same seed twice, and keeps failures apart."""

from __future__ import annotations

import asyncio
import importlib
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces

from resources.environments.adapters.global_random import GlobalRandom
from resources.environments.adapters.packages import import_optional
from resources.environments.adapters.space_text import check_readable, parse_value, plain_text, value_text
from resources.environments.base import Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.environments.instances import ADAPTERS
from resources.environments.processes import ChildProcesses
from resources.environments.registry import make_environment
from resources.environments.seeds import EVAL_SEEDS_FROM, narrow_seed
from resources.failures import EnvironmentFailure
from tests.other_libraries import FOLDER, is_there

GSM8K = [
    {"prompt": f"What is {a} plus {a}?", "extras": {"reward_spec": {"ground_truth": str(2 * a)}}} for a in range(2, 40)
]
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "taxi": ("gymnasium", {"id": "Taxi-v4", "max_turns": 6}, ["south", "east", "pickup", "north", "west", "dropoff"]),
    "cards": ("gymnasium", {"id": "Blackjack-v1", "max_turns": 4}, ["hit", "stick"]),
    "cart": ("gymnasium", {"id": "CartPole-v1", "max_turns": 4}, ["left", "right", "left", "right"]),
    "guess": ("textarena", {"id": "GuessTheNumber-v0"}, ["[10]", "[5]", "[15]", "[12]"]),
    "mines": ("textarena", {"id": "Minesweeper-v0-small"}, ["[3 3]", "[0 0]"]),
    "sums": ("reasoning_gym", {"dataset": "chain_sum"}, ["<answer>12</answer>"]),
    "countdown": ("reasoning_gym", {"dataset": "countdown"}, ["<answer>1+1</answer>"]),
    "words": ("skyrl_gym", {"id": "gsm8k", "problems": GSM8K}, ["#### 12"]),
    "talk": ("skyrl_gym", {"id": "gsm8k_multi_turn", "problems": GSM8K, "max_turns": 3}, ["#### 0", "hm", "#### 1"]),
}
PACKAGES = {"reasoning_gym": "reasoning_gym", "skyrl_gym": "skyrl_gym", "textarena": "textarena"}


def family(environment: str, arguments: dict[str, Any], **settings: Any) -> FamilyConfig:
    return FamilyConfig(environment=environment, arguments=arguments, hardware_class="compute", **settings)


@pytest.fixture(autouse=True)
def other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a test of this file runs, and behind everything else: no other test, and no process of one, sees them."""
    monkeypatch.setattr(sys, "path", [*sys.path, *map(str, FOLDER.glob("lib/python*/site-packages"))])


def actions_of(name: str) -> list[str]:
    environment, _, actions = FAMILIES[name]
    return [f"<act>{action}</act>" for action in actions] if environment == "gymnasium" else actions


def needs(environment: str) -> None:
    package = PACKAGES.get(environment)
    if package is not None and not is_there(package):
        pytest.skip(f"{package} is not installed; `make test` does it, or pip install 'rollart[{environment}]'")


async def episode(
    config: FamilyConfig, seed: int, actions: Sequence[str], children: ChildProcesses | None = None
) -> tuple[list[Message], list[StepOutcome]]:
    environment = make_environment(config, children=children)
    opening = await environment.reset(seed)
    outcomes = []
    for action in actions:
        outcomes.append(await environment.step(action))
        if outcomes[-1].terminated or outcomes[-1].truncated:
            break
    await environment.close()
    return opening, outcomes


def play(config: FamilyConfig, seed: int, actions: Sequence[str]) -> tuple[list[Message], list[StepOutcome]]:
    return asyncio.run(episode(config, seed, actions))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_seed_gives_the_same_episode(name: str) -> None:
    environment, arguments, _ = FAMILIES[name]
    needs(environment)
    config, actions = family(environment, arguments), actions_of(name)
    first, again = play(config, 7, actions), play(config, 7, actions)
    assert first == again
    openings = {str(play(config, seed, actions)) for seed in range(12)}
    assert len(openings) > 1, "the seed changes nothing"


@pytest.mark.parametrize("name", ["taxi", "mines", "sums"])
def test_siblings_that_play_at_once_do_not_disturb_each_other(name: str) -> None:
    """Blocking environments run in threads side by side; some of their libraries draw from the global generator."""
    environment, arguments, _ = FAMILIES[name]
    needs(environment)
    config, actions = family(environment, arguments), actions_of(name)

    async def main() -> list[Any]:
        return await asyncio.gather(*(episode(config, seed % 4, actions) for seed in range(32)))

    alone = [play(config, seed, actions) for seed in range(4)]
    for index, outcome in enumerate(asyncio.run(main())):
        assert outcome == alone[index % 4]


@pytest.mark.parametrize("name", ["taxi", "guess", "sums"])
def test_a_child_process_plays_the_same_episode(name: str) -> None:
    environment, arguments, _ = FAMILIES[name]
    needs(environment)
    config, actions = family(environment, arguments, executor="process", reset_deadline_s=120), actions_of(name)

    async def main() -> Any:
        children = ChildProcesses(name, config)
        try:
            return await episode(config, 7, actions, children)
        finally:
            await children.close()

    assert asyncio.run(main()) == play(config, 7, actions)


@pytest.mark.parametrize("package", ["textarena", "reasoning_gym", "skyrl_gym"])
def test_a_missing_package_is_an_error_that_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.import_module

    def refuse(name: str, *rest: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *rest)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ValueError, match=rf"'{package}' does not import .*pip install 'rollart\[{package}\]'"):
        import_optional(package, package)
    arguments = {
        "textarena": {"id": "Uncached-v0"},
        "reasoning_gym": {"dataset": "uncached"},
        "skyrl_gym": {"id": "gsm8k", "problems": GSM8K},
    }[package]
    with pytest.raises(ValueError, match=r"pip install"):
        make_environment(family(package, arguments))


# -- gymnasium ---------------------------------------------------------------------------------------------------------


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


# -- textarena, reasoning_gym, skyrl_gym -------------------------------------------------------------------------------


def test_a_game_of_textarena_is_won_and_says_only_what_is_new() -> None:
    needs("textarena")
    config = family("textarena", {"id": "GuessTheNumber-v0"})
    opening, _ = play(config, 5, [])
    assert "between 1 and 20" in opening[0]["content"]
    for number in range(1, 21):
        _, outcomes = play(config, 5, [str(number)])
        if outcomes[0].terminated:
            assert outcomes[0].success and outcomes[0].reward == 1.0
            break
        assert outcomes[0].observation[0]["content"] in (
            "The target number is higher.", "The target number is lower.",
        )  # fmt: skip
    else:
        pytest.fail("no number was right")


def test_an_invalid_move_of_textarena_is_the_policys() -> None:
    needs("textarena")
    config = family("textarena", {"id": "GuessTheNumber-v0"})
    _, outcomes = play(config, 5, ["what?", "[99]"])
    first, second = outcomes
    assert first.invalid_action and not first.terminated and first.reward == pytest.approx(-0.1)
    assert "invalid move" in first.observation[0]["content"]
    assert second.invalid_action and second.terminated and second.success is False


def test_textarenas_own_turn_limit_truncates() -> None:
    needs("textarena")
    config = family("textarena", {"id": "GuessTheNumber-v0", "kwargs": {"max_turns": 2}})
    for seed in range(3):
        _, outcomes = play(config, seed, ["[1]", "[2]", "[3]"])
        if not outcomes[-1].success:
            assert (outcomes[-1].terminated, outcomes[-1].truncated) == (False, True)
            return
    pytest.fail("three seeds in a row have the number 1, 2 or 3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"id": "Nothing-v0"}, "no game 'Nothing-v0'"), ({"id": "TicTacToe-v0"}, "cannot start 'TicTacToe-v0' for one")],
)
def test_what_textarena_cannot_play_alone_is_said(arguments: dict[str, Any], message: str) -> None:
    needs("textarena")
    with pytest.raises(ValueError, match=message):
        make_environment(family("textarena", arguments))


def test_the_global_generator_is_given_back() -> None:
    random.seed(1)
    expected = random.Random(1)
    own = GlobalRandom(5)
    first = random.random()
    with own.taken_over():
        drawn = random.random()
    second = random.random()
    with own.taken_over():
        drawn_next = random.random()
    stream = random.Random(5)
    assert (drawn, drawn_next) == (stream.random(), stream.random())
    assert (first, second) == (expected.random(), expected.random())


def test_reasoning_gym_scores_the_answer() -> None:
    needs("reasoning_gym")
    config = family("reasoning_gym", {"dataset": "chain_sum", "options": {"min_terms": 2, "max_terms": 2}})
    environment: Any = make_environment(config)
    asyncio.run(environment.reset(3))
    right, wrong = environment.expert_action(), environment.random_action(random.Random(0))
    assert right.startswith("<answer>") and right != wrong
    for action, reward, success in ((right, 1.0, True), (wrong, 0.0, False)):
        _, (outcome,) = play(config, 3, [action])
        assert (outcome.reward, outcome.success, outcome.terminated) == (reward, success, True)
    _, (outcome,) = play(config, 3, ["12"])
    assert (outcome.invalid_action, outcome.truncated, outcome.success) == (True, True, False)
    with pytest.raises(ValueError, match="'chain_sums' not registered"):
        make_environment(family("reasoning_gym", {"dataset": "chain_sums"}))
    with pytest.raises(ValueError, match="cannot make 'chain_sum' with .*terms"):
        make_environment(family("reasoning_gym", {"dataset": "chain_sum", "options": {"terms": 2}}))


def test_skyrl_gym_scores_and_tells_its_ends_apart(tmp_path: Path) -> None:
    needs("skyrl_gym")
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1 + 1?", "extras": {"reward_spec": {"ground_truth": "2"}}}\n')
    config = family("skyrl_gym", {"id": "gsm8k", "problems": str(path)})
    opening, (outcome,) = play(config, 0, ["#### 2"])
    assert opening == [{"role": "user", "content": "1 + 1?"}]
    assert (outcome.reward, outcome.terminated, outcome.success) == (1.0, True, True)
    _, (outcome,) = play(config, 0, ["#### 3"])
    assert (outcome.terminated, outcome.truncated, outcome.success) == (True, False, False)
    several = family("skyrl_gym", {"id": "gsm8k_multi_turn", "problems": str(path), "max_turns": 2})
    _, outcomes = play(several, 0, ["#### 3", "#### 4"])
    assert outcomes[0].observation[0]["role"] == "user"
    assert (outcomes[1].terminated, outcomes[1].truncated, outcomes[1].success) == (False, True, False)
    held_out = {"id": "gsm8k", "problems": str(path), "eval_problems": GSM8K}
    opening, _ = play(family("skyrl_gym", held_out), EVAL_SEEDS_FROM + 5, [])
    assert "plus" in opening[0]["content"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "gsm9k", "problems": GSM8K}, "no environment 'gsm9k'; it has .*gsm8k"),
        ({"id": "gsm8k", "problems": []}, "problems is empty"),
        ({"id": "gsm8k", "problems": "nowhere.jsonl"}, "problems is 'nowhere.jsonl', which cannot be read"),
        ({"id": "gsm8k", "problems": [{"question": "1"}]}, "problems.0. is"),
    ],
)
def test_what_skyrl_gym_cannot_play_is_said(arguments: dict[str, Any], message: str) -> None:
    needs("skyrl_gym")
    with pytest.raises(ValueError, match=message):
        make_environment(family("skyrl_gym", arguments))


def test_narrow_seeds_keep_the_splits_apart() -> None:
    seeds: Callable[[int], list[int]] = lambda start: [narrow_seed(start + 7**n) for n in range(20)]  # noqa: E731
    assert max(seeds(0)) < 2**30 <= min(seeds(EVAL_SEEDS_FROM)) and max(seeds(EVAL_SEEDS_FROM)) < 2**31


PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def families_of_the_page() -> dict[str, dict[str, Any]]:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {name: each for block in blocks for name, each in yaml.safe_load(block)["families"].items()}


def test_the_page_shows_every_way_to_plug_in() -> None:
    shown = {each["environment"] for each in families_of_the_page().values()}
    assert {"gymnasium", "textarena", "reasoning_gym", "openenv", "tool_server", "counting:Counting"} <= shown
    assert shown - ADAPTERS.keys() == {"counting:Counting"}


@pytest.mark.parametrize("name", sorted(families_of_the_page().keys() - {"counting"}))
def test_the_run_files_of_the_page_make_environments(name: str) -> None:
    """Names, arguments and their values, as written there; `counting` is played as an example."""
    config = FamilyConfig.model_validate(families_of_the_page()[name])
    needs(config.environment)
    assert make_environment(config).max_turns >= 1
