"""Tool calls: read from text, checked, answered under their ids, here and over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from resources.environments.base import Environment, Message, StepOutcome
from resources.environments.deadline import DeadlineEnvironment
from resources.environments.family import FamilyConfig
from resources.environments.registry import make_environment
from resources.environments.threads import DaemonThreads
from resources.environments.tools.addresses import check_addresses, in_turn
from resources.environments.tools.service import ToolService, maker
from resources.environments.tools.tool_calls import Tool, parse_reply
from resources.environments.tools.tool_environment import ToolEnvironment, ToolError
from resources.environments.tools.tool_server import ToolServerEnvironment
from resources.environments.transcripts import noisy_expert_episode, policy_rate
from resources.failures import EnvironmentFailure
from tests.unit.tool_environments import NUMBERS, Quotients


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def openai(*calls: tuple[str, str, str], content: str | None = None) -> str:
    """(id, name, arguments as text)"""
    listed = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": text}} for each, name, text in calls
    ]
    return json.dumps({"role": "assistant", "content": content, "tool_calls": listed})


# -- parsing -----------------------------------------------------------------------------------------------------------


def test_hermes_calls_are_read_in_order_with_what_is_said_beside_them() -> None:
    reply = parse_reply(f"Let me see. {call('divide', a=6, b=3)}\n{call('give_up')} so", 2)
    assert reply.content == "Let me see. \n so"
    assert [(each.id, each.name, each.arguments, each.error) for each in reply.calls] == [
        ("call_2_0", "divide", {"a": 6, "b": 3}, None),
        ("call_2_1", "give_up", {}, None),
    ]
    assert reply.calls[0].declaration() == {
        "id": "call_2_0",
        "type": "function",
        "function": {"name": "divide", "arguments": '{"a": 6, "b": 3}'},
    }


def test_openai_messages_keep_their_ids() -> None:
    reply = parse_reply(openai(("x1", "divide", '{"a": 6, "b": 3}'), ("", "give_up", ""), content="hm"), 0)
    assert reply.content == "hm"
    assert [(each.id, each.name, each.arguments) for each in reply.calls] == [
        ("x1", "divide", {"a": 6, "b": 3}),
        ("call_0_1", "give_up", {}),
    ]
    twice = parse_reply(openai(("x1", "divide", "{}"), ("x1", "divide", "{}")), 0)
    assert [each.id for each in twice.calls] == ["x1", "call_0_1"], "an answer must belong to one call"


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ('<tool_call>{"name": "divide", "arguments": {"a":', "divide", "the call is no JSON"),
        ('<tool_call>{"name": "divide", "arguments": {"a":</tool_call>', "divide", "the call is no JSON"),
        (openai(("x1", "divide", '{"a":')), "divide", "the arguments are no JSON"),
        ('{"tool_calls": [{"id": "x1", "function": {"name": "divide"', "", "the message is no JSON"),
        ('<tool_call>{"name": "divide", "arguments": [1]}</tool_call>', "divide", "the arguments are no JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "", "the call names no tool"),
        ("<tool_call>[1]</tool_call>", "", "a call is"),
        ("<tool_call></tool_call>", "", "the call is no JSON"),
        ('<tool_call>{"name": "divide", "arguments": {"a": NaN, "b": 1}}</tool_call>', "divide", "NaN is no JSON"),
        ("<tool_call>" + '{"a":' * 100_000, "", "the call is no JSON"),
    ],
)
def test_what_cannot_be_read_is_one_call_that_says_why(text: str, name: str, error: str) -> None:
    (unreadable,) = parse_reply(text, 0).calls
    assert unreadable.name == name and unreadable.arguments is None
    assert unreadable.error is not None and error in unreadable.error and len(unreadable.error) <= 160
    assert unreadable.id == ("x1" if "x1" in text and "message" not in unreadable.error else "call_0_0")


@pytest.mark.parametrize("text", ["282", '{"answer": 3}', '{"tool_calls": []}', "", "a < b"])
def test_text_without_a_call_is_an_answer(text: str) -> None:
    assert parse_reply(text, 0).calls == () and parse_reply(text, 0).content == text


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (lambda: Tool("two words"), "a tool is called 'two words'"),
        (lambda: Tool("t", parameters={"type": "objekt"}), "tool 't': its parameters are no JSON schema"),
    ],
)
def test_a_tool_that_cannot_be_declared_is_refused(tool: Callable[[], Tool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tool()


# -- episodes, with tools here and behind a server ---------------------------------------------------------------------


def here() -> ToolEnvironment:
    return Quotients()


def behind_a_server() -> ToolEnvironment:
    transport = httpx.ASGITransport(ToolService(Quotients).application(), raise_app_exceptions=False)
    return ToolServerEnvironment(["http://tools:8100"], max_turns=4, transport=transport)


both = pytest.mark.parametrize("make", [here, behind_a_server])


def play(inner: ToolEnvironment, *actions: str, seed: int = 5) -> tuple[list[Message], list[StepOutcome]]:
    async def main() -> tuple[list[Message], list[StepOutcome]]:
        environment = DeadlineEnvironment(
            inner, family="mine", reset_deadline_s=20, step_deadline_s=20, threads=DaemonThreads(1)
        )
        opening = await environment.reset(seed)
        try:
            return opening, [await environment.step(action) for action in actions]
        finally:
            await environment.close()

    return asyncio.run(main())


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


# -- servers that fail -------------------------------------------------------------------------------------------------


class Servers(httpx.AsyncBaseTransport):
    """Several hosts: some serve, ``down`` is not there, ``slow`` never answers."""

    def __init__(self, **hosts: ToolService) -> None:
        self.served: list[str] = []
        self._hosts = {name: httpx.ASGITransport(service.application()) for name, service in hosts.items()}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host.startswith("down") or host not in self._hosts:
            raise httpx.ConnectError("connection refused", request=request)
        self.served.append(f"{request.method} {host}")
        return await self._hosts[host].handle_async_request(request)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


def test_episodes_go_round_and_pass_over_servers_that_are_down_or_full() -> None:
    async def scenario() -> None:
        full, free = ToolService(Quotients, max_sessions=1), ToolService(Quotients)
        servers = Servers(a1=full, b1=free)
        addresses = ["http://a1:1", "http://down1:1", "http://b1:1"]
        playing = [ToolServerEnvironment(addresses, transport=servers) for _ in range(4)]
        for environment in playing:
            await environment.reset(1)
        assert servers.served == ["POST a1", "POST b1", "POST b1", "POST a1", "POST b1"]
        for environment in playing:
            await environment.close()
        again = ToolServerEnvironment(["http://a1:1"], transport=servers)
        await again.reset(1)  # its session was given back
        await again.close()

    run(scenario)


def test_with_no_server_left_the_failure_names_each() -> None:
    async def scenario() -> None:
        environment = ToolServerEnvironment(["http://down2:1", "http://full2:1"], transport=Servers(full2=no_room()))
        with pytest.raises(EnvironmentFailure, match=r"no tool server .*down2.*refused.*full2.*503.*are taken"):
            await environment.reset(1)
        await environment.close()

    run(scenario)


def no_room() -> ToolService:
    return ToolService(Quotients, max_sessions=0)


def test_a_session_that_is_lost_fails_the_episode() -> None:
    async def scenario() -> None:
        service = ToolService(Quotients)
        environment = ToolServerEnvironment(["http://lost:1"], transport=Servers(lost=service))
        await environment.reset(1)
        service._sessions.clear()
        with pytest.raises(EnvironmentFailure, match="404.*no such session"):
            await environment.step(call("divide", a=1, b=1))
        await environment.close()

    run(scenario)


def test_a_call_that_hangs_ends_at_the_familys_deadline() -> None:
    async def scenario() -> None:
        environment: Environment = DeadlineEnvironment(
            ToolServerEnvironment(["http://slow:1"], transport=Servers(slow=ToolService(Quotients))),
            family="mine", reset_deadline_s=20, step_deadline_s=0.1, threads=DaemonThreads(1),
        )  # fmt: skip
        await environment.reset(1)
        with pytest.raises(EnvironmentFailure, match=r"mine: step did not return within 0.1 s"):
            await environment.step(call("hang"))
        await environment.close()

    run(scenario)


def test_idle_sessions_make_room() -> None:
    async def scenario() -> None:
        now = 0.0
        service = ToolService(Quotients, max_sessions=1, idle_s=60, clock=lambda: now)
        servers = Servers(idle=service)
        forgotten, wanted = (ToolServerEnvironment(["http://idle:1"], transport=servers) for _ in range(2))
        await forgotten.reset(1)
        now = 59.0
        with pytest.raises(EnvironmentFailure, match="503"):
            await wanted.reset(2)
        now = 60.0
        await wanted.reset(2)
        await wanted.close()
        await forgotten.close()

    run(scenario)


def test_addresses_are_checked_and_taken_in_turn() -> None:
    family = FamilyConfig(environment="tool_server", arguments={"addresses": ["tools:8100"]}, hardware_class="compute")
    with pytest.raises(ValueError, match=r"addresses holds 'tools:8100'; an address is http or https://host:port"):
        make_environment(family)
    with pytest.raises(ValueError, match="addresses is 'http://one:1'; it must be a list"):
        check_addresses("http://one:1", ("http",))
    addresses = check_addresses(["http://turn1:1/", "http://turn2:2"], ("http",))
    assert [in_turn(addresses)[0] for _ in range(3)] == ["http://turn1:1", "http://turn2:2", "http://turn1:1"]
    assert sorted(in_turn(addresses)) == ["http://turn1:1", "http://turn2:2"]


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


def test_a_served_environment_is_played_over_a_socket() -> None:
    """The command of the page, a real server and a real client."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "resources.environments.tools.service", "tests.unit.tool_environments:Quotients"]
    with subprocess.Popen([*command, "--port", str(port)]) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}", process)
            inner = ToolServerEnvironment([f"http://127.0.0.1:{port}"], max_turns=4)
            _, (outcome, answered) = play(inner, call("divide", a=8, b=2), "x")
            assert outcome.observation[0]["content"] == "4" and answered.success is False
        finally:
            process.kill()


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "the server ended"
        try:
            httpx.get(address)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail("the server did not answer within 60 s")


@pytest.mark.parametrize(
    ("environment", "message"), [("guess_number", "is no ToolEnvironment"), ("no.such:Class", "does not import")]
)
def test_only_environments_with_tools_are_served(environment: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        maker(environment, {})


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
