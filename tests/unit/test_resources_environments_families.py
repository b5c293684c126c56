"""The four families: what they show, what they reward, and how well experts and random players do."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from resources.environments.action_text import parse_action
from resources.environments.base import ScriptedExpert, StepOutcome
from resources.environments.calculator import Calculator, evaluate
from resources.environments.code_repair import PROBLEMS, CodeRepair
from resources.environments.frozen_lake import DIRECTIONS, FrozenLake
from resources.environments.guess_number import GuessNumber
from resources.environments.instances import BUILT_IN, resolve
from resources.environments.registry import quickstart_families
from resources.environments.seeds import episode_seed
from resources.environments.transcripts import noisy_expert_episode, policy_rate
from resources.rewards.base import ScoringRequest
from resources.rewards.scorers.exact_answer import ExactAnswerScorer
from resources.rewards.scorers.unit_tests import UnitTestsScorer
from resources.sandbox.runner import run_tests


def play(environment: Any, seed: int, *actions: str) -> tuple[list[dict[str, str]], list[StepOutcome]]:
    async def main() -> tuple[list[dict[str, str]], list[StepOutcome]]:
        opening = await environment.reset(seed)
        return opening, [await environment.step(action) for action in actions]

    return asyncio.run(main())


def judged(payload: dict[str, Any]) -> bool:
    scorer = ExactAnswerScorer() if "expected" in payload else UnitTestsScorer()
    return bool(scorer.score(ScoringRequest("t", "f", scorer.name, scorer.version, payload)).success)


@pytest.mark.parametrize(
    ("family", "expert", "random_from", "random_to"),
    [
        ("frozen_lake", 1.0, 0.0, 0.05),  # about .02
        ("guess_number", 1.0, 0.29, 0.44),  # 1 - (6/7)^3 = .370
        ("calculator", 1.0, 0.0, 0.02),  # about .001
        ("code_repair", 1.0, 0.19, 0.35),  # about 1 - (6/7)^2 = .265
    ],
)  # fmt: skip
def test_success_of_expert_and_random_player(family: str, expert: float, random_from: float, random_to: float) -> None:
    config = quickstart_families()[family]
    assert asyncio.run(policy_rate(config, "expert", 200, seed=1)) == expert
    assert random_from <= asyncio.run(policy_rate(config, "random", 400, seed=1)) <= random_to


@pytest.mark.parametrize(
    ("family", "p_random", "rate_from", "rate_to"),
    [("frozen_lake", 0.5, 0.27, 0.47), ("guess_number", 0.6, 0.43, 0.63), ("calculator", 0.3, 0.62, 0.82),
     ("code_repair", 0.5, 0.72, 0.90)],
)  # fmt: skip
def test_noise_leaves_something_to_learn(family: str, p_random: float, rate_from: float, rate_to: float) -> None:
    """Success of the warm start's data: .36, .53, .72, .83."""
    config, rng = quickstart_families()[family], random.Random(0)

    async def rate() -> float:
        episodes = [
            await noisy_expert_episode(config, episode_seed(0, family, index, "train"), p_random, rng)
            for index in range(300)
        ]
        return sum(episode.success for episode in episodes) / len(episodes)

    assert rate_from <= asyncio.run(rate()) <= rate_to


@pytest.mark.parametrize("family", sorted(BUILT_IN))
def test_the_same_seed_is_the_same_episode(family: str) -> None:
    config = quickstart_families()[family]

    def transcript(seed: int) -> Any:
        return asyncio.run(noisy_expert_episode(config, seed, 0.5, random.Random(3)))

    assert transcript(11) == transcript(11)
    assert any(transcript(11) != transcript(seed) for seed in range(12, 40))


@pytest.mark.parametrize("family", sorted(BUILT_IN))
def test_roles_alternate_and_every_valid_action_is_valid(family: str) -> None:
    config, rng = quickstart_families()[family], random.Random(5)
    for seed in range(20):
        transcript = asyncio.run(noisy_expert_episode(config, seed, 0.5, rng))
        roles = [message["role"] for message in transcript.messages]
        assert roles[:2] == ["system", "user"] and roles[-1] == "assistant"
        assert all((role == "assistant") == (place % 2 == 0) for place, role in enumerate(roles[2:]))
        assert not any("error" in message["content"] for message in transcript.messages)
        assert 0.0 <= transcript.reward <= 1.0 and transcript.success == (transcript.reward == 1.0)


@pytest.mark.parametrize("family", sorted(BUILT_IN))
@pytest.mark.parametrize(
    "action",
    [
        "",
        "left",
        '{"a":',
        '<tool>{"a":</tool>',
        "<act>fly</act>",
        "<act>",
        "<act>left</act><act>left</act>",
        "<edit>a +</edit>",
        "<edit>a\nimport os</edit>",
        "<edit>1or 2</edit>",
        "<answer>x</answer>",
        "<answer>1</answer> I think",
        "<answer></answer>",
        "<answer>²</answer>",
        "<tool></tool>",
        "\x00",
    ],
)
def test_a_malformed_action_is_an_error_observation_and_the_next_turn(family: str, action: str) -> None:
    """S14: -0.1, flagged, the episode goes on; after the last turn it is over with nothing to append."""
    environment = resolve(family)()
    num_turns = environment.max_turns
    _, outcomes = play(environment, 3, *[action] * num_turns)
    for outcome in outcomes:
        assert outcome.invalid_action and outcome.reward == -0.1 and outcome.components == {"invalid_action": -0.1}
    for outcome in outcomes[:-1]:
        assert not outcome.terminated and not outcome.truncated
        (message,) = outcome.observation
        assert message["content"].startswith("error: ") and message["role"] in ("user", "tool")
    assert outcomes[-1].observation == [] and outcomes[-1].terminated != outcomes[-1].truncated
    payload = environment.judgement()
    if payload is not None:
        assert payload["num_invalid_actions"] == num_turns and not judged(payload)


@pytest.mark.parametrize("family", sorted(BUILT_IN))
def test_built_in_environments_offer_an_expert(family: str) -> None:
    assert isinstance(resolve(family)(), ScriptedExpert)


def test_parse_action_takes_exactly_one_action() -> None:
    assert parse_action(" <act> left </act>\n", ("act",)) == ("act", "left")
    assert parse_action("<edit>a<b</edit>", ("edit",)) == ("edit", "a<b")
    for text in ("<act>left</act> <act>up</act>", "<act>left</answer>", "<tool>left</tool>", "left", "<act>left"):
        assert parse_action(text, ("act",)) is None, text


# frozen_lake


def test_frozen_lake_shows_the_map_once_and_then_the_surroundings() -> None:
    environment = FrozenLake()
    opening, (first,) = play(environment, 5, "<act>down</act>")
    lines = opening[1]["content"].split("\n")
    assert len(lines) == 5 and all(len(line) == 4 and set(line) <= set("SFHG") for line in lines[:4])
    assert lines[0][0] == "S" and lines[3][3] == "G"
    assert lines[4] == f"0 0 left # down {lines[1][0]} right {lines[0][1]} up #"
    expected = f"1 0 left # down {lines[2][0]} right {lines[1][1]} up S"
    assert first.observation == [{"role": "user", "content": expected}]


def test_frozen_lake_ends_terminated_in_a_hole_and_truncated_at_the_limit() -> None:
    environment = FrozenLake()
    _, outcomes = play(environment, 5, *["<act>up</act>"] * 10)
    assert [outcome.truncated for outcome in outcomes] == [False] * 9 + [True]
    assert outcomes[-1].success is False and outcomes[-1].reward == 0.0 and not outcomes[-1].terminated
    holes = 0
    for seed in range(40):
        rng = random.Random(seed)
        _, outcomes = play(environment, seed, *[f"<act>{rng.choice(DIRECTIONS)}</act>" for _ in range(10)])
        first_end = next(i for i, outcome in enumerate(outcomes) if outcome.terminated or outcome.truncated)
        end = outcomes[first_end]
        if end.terminated and not end.success:
            holes += 1
            assert end.reward == 0.0 and not end.truncated and end.observation == []
    assert holes > 10


def test_frozen_lake_reaching_the_goal_on_the_last_turn_is_terminated() -> None:
    environment = FrozenLake(size=2, frozen_share=1.0, max_turns=2)
    _, outcomes = play(environment, 0, "<act>down</act>", "<act>right</act>")
    assert (outcomes[1].terminated, outcomes[1].truncated) == (True, False)
    assert (outcomes[1].reward, outcomes[1].success) == (1.0, True)
    assert outcomes[1].components == {"outcome": 1.0}


# guess_number


def test_guess_number_names_the_remaining_range() -> None:
    environment = GuessNumber()
    seed = next(seed for seed in range(50) if random.Random(seed).randint(1, 7) == 5)
    opening, outcomes = play(environment, seed, "<answer>2</answer>", "<answer>6</answer>", "<answer>5</answer>")
    assert opening[1]["content"] == "1 to 7"
    assert outcomes[0].observation[0]["content"] == "higher 3 to 7"
    assert outcomes[1].observation[0]["content"] == "lower 3 to 5"
    assert outcomes[2] == StepOutcome([], reward=1.0, terminated=True, success=True, components={"outcome": 1.0})


def test_guess_number_a_guess_outside_the_range_is_wasted_but_valid() -> None:
    environment = GuessNumber()
    seed = next(seed for seed in range(50) if random.Random(seed).randint(1, 7) == 5)
    _, outcomes = play(environment, seed, "<answer>4</answer>", "<answer>1</answer>", "<answer>7</answer>")
    assert outcomes[1].observation[0]["content"] == "higher 5 to 7" and not outcomes[1].invalid_action
    assert outcomes[2].terminated and outcomes[2].success is False and outcomes[2].reward == 0.0


# calculator


def test_guess_number_knows_the_outcome_when_the_last_guess_is_malformed() -> None:
    _, outcomes = play(GuessNumber(), 3, "?", "?", "?")
    assert [outcome.success for outcome in outcomes] == [None, None, False]
    assert outcomes[2].terminated and outcomes[2].invalid_action and outcomes[2].observation == []


def test_calculator_calls_the_tool_and_answers() -> None:
    environment = Calculator()
    opening, _ = play(environment, 4)
    question = opening[1]["content"]
    want = str(evaluate(question))
    _, outcomes = play(environment, 4, f"<tool>{question}</tool>", f"<answer> 0{want} </answer>")
    assert outcomes[0].observation == [{"role": "tool", "content": want}] and outcomes[0].tool_name == "calculator"
    assert outcomes[1].terminated and outcomes[1].success is None
    assert environment.judgement() == {"answer": want, "expected": want, "num_invalid_actions": 0}


def test_calculator_without_an_answer_is_truncated_and_fails() -> None:
    environment = Calculator()
    _, outcomes = play(environment, 4, *["<tool>1+1</tool>"] * 3)
    assert [(outcome.terminated, outcome.truncated) for outcome in outcomes] == [(False, False)] * 2 + [(False, True)]
    payload = environment.judgement()
    assert payload["answer"] is None and not judged(payload)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("47*6", 282), ("12 - 19", -7), ("-(2+3)*4", -20), ("9/3", None), ("2**8", None), ("a+1", None), ("1+", None),
     ("1.5+1", None), ("__import__('os')", None), ("1" * 41, None), ("", None), ("07+1", None), ("()", None)],
)  # fmt: skip
def test_calculator_evaluates_integer_arithmetic_only(expression: str, value: int | None) -> None:
    assert evaluate(expression) == value


# code_repair


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_code_repair_hidden_tests_tell_the_right_body_from_every_other(problem: Any) -> None:
    others = {body for other in PROBLEMS for body in (other.right, *(wrong for wrong, _ in other.wrong))} - {
        problem.right
    }
    assert not problem.right.startswith(f"{problem.name}(")  # a name that its right body calls would call itself
    environment = CodeRepair()
    seed = next(seed for seed in range(100) if random.Random(seed).choice(PROBLEMS) is problem)
    play(environment, seed)
    payload = environment.judgement()
    assert not run_tests(payload["code"], payload["tests"]).passed  # as it was given
    head = payload["code"].split("return")[0]
    assert run_tests(f"{head}return {problem.right}", payload["tests"]).passed
    for body in sorted(others):
        assert not run_tests(f"{head}return {body}", payload["tests"]).passed, body


def test_code_repair_shows_what_the_visible_test_says() -> None:
    environment = CodeRepair()
    seed = next(seed for seed in range(100) if random.Random(seed).choice(PROBLEMS).name == "larger")
    opening, (outcome,) = play(environment, seed, "<edit>0</edit>")
    code, failure = opening[1]["content"].split("\n")
    assert code.startswith("def larger(a,b): return ") and failure.startswith("larger(")
    call, wanted = failure.split(" gave ")[0], failure.split(", want ")[1]
    assert outcome.observation == [{"role": "user", "content": f"{call} gave 0, want {wanted}"}]
    assert outcome.tool_name == "visible_test" and not outcome.invalid_action


def test_code_repair_passing_the_visible_test_alone_does_not_pass() -> None:
    """Hard-coding what the visible test wants ends the episode, and the hidden tests fail it."""
    environment = CodeRepair()
    opening, _ = play(environment, 2)
    wanted = opening[1]["content"].split(", want ")[1]
    _, (outcome,) = play(environment, 2, f"<edit>{wanted}</edit>")
    assert outcome.terminated and not outcome.truncated and outcome.success is None
    assert not judged(environment.judgement())


def test_code_repair_an_endless_body_is_a_failed_attempt() -> None:
    """S13, inside an environment: the loop is killed at its deadline and the episode goes on."""
    environment = CodeRepair(test_deadline_s=0.3)
    _, (outcome,) = play(environment, 2, "<edit>[1 for _ in iter(int,1)]</edit>")
    assert outcome.observation == [{"role": "user", "content": "ran past its deadline"}]


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("frozen_lake", {"size": 1}, "size is 1; it must be 2 to 16"),
        ("frozen_lake", {"max_turns": 5}, "max_turns is 5; a map of size 4 needs at least 6"),
        ("frozen_lake", {"frozen_share": 0.1}, "frozen_share is 0.1"),
        ("guess_number", {"highest": 8}, "3 guesses cannot find every number up to 8; num_guesses must be at least 4"),
        ("guess_number", {"highest": 1}, "highest is 1"),
        ("calculator", {"max_turns": 1}, "max_turns is 1"),
        ("calculator", {"operators": "/"}, "operators is '/'"),
        ("code_repair", {"num_attempts": 0}, "num_attempts is 0"),
        ("code_repair", {"test_deadline_s": 0}, "test_deadline_s is 0"),
    ],
)
def test_arguments_that_cannot_work_are_refused(family: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(family)(**arguments)
