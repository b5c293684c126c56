"""Environments with tools: calls are checked and answered under their ids, here and over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from resources.environments.base import Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.environments.tools.service import ToolService
from resources.environments.tools.tool_calls import Tool
from resources.environments.tools.tool_environment import ToolEnvironment, ToolError
from resources.environments.tools.tool_server import ToolServerEnvironment
from resources.environments.transcripts import noisy_expert_episode, policy_rate
from resources.failures import EnvironmentFailure
from tests.unit.tool_environments import NUMBERS, Quotients, call, openai, play


def here() -> ToolEnvironment:
    return Quotients()


def behind_a_server() -> ToolEnvironment:
    transport = httpx.ASGITransport(ToolService(Quotients).application(), raise_app_exceptions=False)
    return ToolServerEnvironment(["http://tools:8100"], max_turns=4, transport=transport)


both = pytest.mark.parametrize("make", [here, behind_a_server])


@both
def test_the_opening_declares_the_tools_and_the_same_seed_gives_the_same_episode(
    make: Callable[[], ToolEnvironment],
) -> None:
    opening, _ = play(make())
    assert [message["role"] for message in opening] == ["system", "user"]
    assert opening[0]["content"].startswith("Be exact.\nYou may call tools:\n<tools>\n")
    declared = [json.loads(line) for line in opening[0]["content"].splitlines() if line.startswith('{"type"')]
    assert [each["function"]["name"] for each in declared] == ["divide", "give_up", "hang", "break"]
    assert declared[0]["function"]["parameters"] == NUMBERS
    actions = (call("divide", a=8, b=2), "4")
    assert play(make(), *actions) == play(make(), *actions)
    assert len({play(make(), seed=seed)[0][1]["content"] for seed in range(8)}) > 1


@both
def test_a_call_is_answered_under_its_id_and_an_answer_ends_the_episode(make: Callable[[], ToolEnvironment]) -> None:
    opening, _ = play(make())
    a, b = (int(part) for part in opening[1]["content"].removeprefix("What is ").removesuffix("?").split(" / "))
    _, (called, answered) = play(make(), f"I divide. {call('divide', a=a, b=b)}", str(a // b))
    (message,) = called.observation
    assert message == {"role": "tool", "content": str(a // b), "name": "divide", "tool_call_id": "call_0_0"}
    assert called.tool_calls[0]["id"] == "call_0_0" and called.tool_name == "divide"
    assert (called.reward, called.terminated, called.invalid_action) == (0.0, False, False)
    assert (answered.reward, answered.terminated, answered.success) == (1.0, True, True)
    _, (wrong,) = play(make(), "-1")
    assert (wrong.reward, wrong.terminated, wrong.success, wrong.tool_calls) == (0.0, True, False, [])


@both
@pytest.mark.parametrize(
    ("action", "call_id", "error"),
    [
        ('<tool_call>{"name": "divide", "arguments": {"a":</tool_call>', "call_0_0", "the call is no JSON"),
        (openai(("x1", "divide", '{"a":')), "x1", "the arguments are no JSON"),
        (call("divide", a=1), "call_0_0", "'b' is a required property"),
        (call("divide", a=1, b="two"), "call_0_0", "b: 'two' is not of type 'integer'"),
        (call("divide", a=1, b=2, c=3), "call_0_0", "Additional properties"),
        (call("multiply", a=1, b=2), "call_0_0", "there is no tool 'multiply'; there are divide, give_up"),
    ],
)
def test_a_malformed_call_is_an_error_under_its_id_and_the_next_turn(
    make: Callable[[], ToolEnvironment], action: str, call_id: str, error: str
) -> None:
    """S14."""
    _, (outcome, after) = play(make(), action, call("divide", a=8, b=2))
    (message,) = outcome.observation
    assert message["role"] == "tool" and message.get("tool_call_id") == call_id
    assert message["content"].startswith("error: ") and error in message["content"]
    assert [each["id"] for each in outcome.tool_calls] == [call_id]
    assert (outcome.reward, outcome.invalid_action, outcome.terminated) == (-0.1, True, False)
    assert after.observation[0]["content"] == "4" and after.observation[0].get("tool_call_id") == "call_1_0"


@both
def test_several_calls_in_a_turn_are_all_answered(make: Callable[[], ToolEnvironment]) -> None:
    text = call("divide", a=8, b=2) + call("multiply") + call("divide", a=9, b=3)
    _, (outcome,) = play(make(), text)
    assert [(each.get("tool_call_id"), each["content"][:6]) for each in outcome.observation] == [
        ("call_0_0", "4"), ("call_0_1", "error:"), ("call_0_2", "3"),
    ]  # fmt: skip
    assert outcome.invalid_action and outcome.reward == -0.1 and outcome.tool_name == "divide,multiply,divide"


@both
def test_calls_after_the_end_of_the_episode_are_answered_and_not_made(make: Callable[[], ToolEnvironment]) -> None:
    _, (outcome,) = play(make(), call("give_up") + call("break"))
    assert [each["content"] for each in outcome.observation] == ["a pity", "error: the episode is over"]
    assert (outcome.terminated, outcome.success, outcome.reward) == (True, False, -1.0)


@both
def test_a_refusal_of_the_tool_is_no_malformed_action(make: Callable[[], ToolEnvironment]) -> None:
    _, (outcome,) = play(make(), call("divide", a=1, b=0))
    assert outcome.observation[0]["content"] == "error: division by zero"
    assert (outcome.reward, outcome.invalid_action) == (0.0, False)


@both
def test_a_tool_that_breaks_is_the_environments_failure(make: Callable[[], ToolEnvironment]) -> None:
    with pytest.raises(EnvironmentFailure, match=r"the tool is broken|/calls answered 500|calls failed"):
        play(make(), call("break"))


@both
def test_the_turn_limit_truncates_and_too_many_calls_are_refused(make: Callable[[], ToolEnvironment]) -> None:
    environment = make()
    environment.max_calls_per_turn = 1
    _, outcomes = play(environment, "", call("divide", a=8, b=2) * 2, "", "")
    assert outcomes[0].observation[0]["content"] == "say a number"
    assert [each["content"] for each in outcomes[1].observation] == ["4", "error: at most 1 calls in a turn"]
    assert [each.truncated for each in outcomes] == [False, False, False, True]


def test_the_judgement_comes_from_the_server() -> None:
    async def main() -> Any:
        environment = behind_a_server()
        await environment.reset(5)
        await environment.step("3")
        payload: Any = await environment.judgement()  # pyright: ignore[reportAttributeAccessIssue]
        await environment.close()
        return payload

    assert asyncio.run(main())["answer"] == "3"


def test_the_example_of_tool_calls_plugs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).resolve().parents[2] / "examples" / "tool_calling"
    monkeypatch.syspath_prepend(str(folder))
    families = yaml.safe_load((folder / "run.yaml").read_text())["families"]
    config = FamilyConfig.model_validate(families["ledger"])
    transcript = asyncio.run(noisy_expert_episode(config, 3, 0.0, random.Random(0)))
    assert transcript.success and transcript.reward == 1.0
    assert [message["role"] for message in transcript.messages[2:]] == ["assistant", "tool", "tool", "assistant"]
    rate = asyncio.run(policy_rate(config, "random", 200, seed=0))
    assert rate < 0.4, "guessing is no way to solve it"


def test_the_class_of_the_page_works_as_written() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
    names: dict[str, Any] = {
        "Message": Message, "StepOutcome": StepOutcome, "Tool": Tool, "ToolEnvironment": ToolEnvironment,
        "ToolError": ToolError, "PRICES": {"lamp": 12},
    }  # fmt: skip
    exec(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0], names)
    said = re.findall(r"`(<tool_call>.*?</tool_call>)`", page)[0]
    _, (called, refused, answered) = play(names["Shop"](), said, call("price", item="sofa"), "12")
    assert [each.observation[0]["content"] for each in (called, refused)] == ["12", "error: no such item"]
    assert answered.success


def test_a_tool_environment_without_its_methods_is_refused_when_it_is_made() -> None:
    class Unfinished(ToolEnvironment):
        def start(self, seed: int) -> str:
            return "go"

    with pytest.raises(TypeError, match="abstract method '?call_tool"):
        Unfinished()  # pyright: ignore[reportAbstractUsage]
