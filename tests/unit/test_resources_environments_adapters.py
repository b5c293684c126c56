"""Environments of other libraries: each adapter plays a real one, the same seed twice, and keeps failures apart."""

from __future__ import annotations

import asyncio
import importlib
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from resources.environments.adapters.global_random import GlobalRandom
from resources.environments.adapters.packages import import_optional
from resources.environments.family import FamilyConfig
from resources.environments.instances import ADAPTERS
from resources.environments.processes import ChildProcesses
from resources.environments.registry import make_environment
from resources.environments.seeds import EVAL_SEEDS_FROM, narrow_seed
from tests.adapter_episodes import episode, family, play
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
