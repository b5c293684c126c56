"""Remote environments over OpenEnv's protocol: against a server of our own that speaks it, and, where openenv is
installed, against OpenEnv's own server."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.server import ServerConnection, serve

from resources.environments.base import Environment, Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.environments.registry import make_environment
from resources.failures import EnvironmentFailure
from tests.other_libraries import interpreter_with

ROOT = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 120


def observation(text: str, reward: float | None = None, done: bool = False, **metadata: bool) -> dict[str, Any]:
    data = {"observation": {"text": text, "metadata": metadata}, "reward": reward, "done": done}
    return {"type": "observation", "data": {**data, "metadata": metadata} if metadata else data}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


async def play_counting(connection: ServerConnection) -> None:
    """One session: say the next three numbers. ``break``, ``cut``, ``vanish`` and ``sleep`` do what they say."""
    number = count = 0
    async for raw in connection:
        request = json.loads(raw)
        data = request.get("data", {})
        message = data.get("message")
        if request["type"] == "close":
            return
        if request["type"] == "reset":
            number, count = random.Random(data["seed"]).randint(1, 9), 0
            reply = observation(f"count on from {number}")
        elif not isinstance(message, str):
            problem = {"type": "missing", "loc": ["message"], "msg": "Field required"}
            reply = error("VALIDATION_ERROR", "Invalid message", errors=[problem])
        elif message == "vanish":
            return
        elif message == "sleep":
            await connection.wait_closed()
            return
        elif message == "break":
            reply = error("EXECUTION_ERROR", "the counter is broken")
        elif message == "cut":
            reply = observation("", 0.0, True, truncated=True)
        else:
            number += 1
            right = message == str(number)
            count += right
            done = not right or count == 3
            reply = (
                observation("", float(right), True, success=right)
                if done
                else observation("louder" if data.get("loud") else "go on", 0.1)
            )
        await connection.send(json.dumps(reply))


class CountingServer:
    """``capacity`` sessions at once; a further one is told that the server is full and is closed."""

    def __init__(self, capacity: int = 100) -> None:
        self.capacity, self.num_sessions, self.num_served = capacity, 0, 0
        self.address = ""

    async def session(self, connection: ServerConnection) -> None:
        if self.num_sessions >= self.capacity:
            await connection.send(json.dumps(error("CAPACITY_REACHED", f"{self.capacity} sessions are open")))
            return
        self.num_sessions += 1
        self.num_served += 1
        try:
            await play_counting(connection)
        finally:
            self.num_sessions -= 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[CountingServer]:
        async with serve(self.session, "127.0.0.1", 0) as server:
            self.address = f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            yield self


@pytest.fixture(scope="module")
def openenvs_server() -> Iterator[str]:
    """The address of OpenEnv's own server, in a process of its own."""
    python = interpreter_with("openenv")
    if python is None:
        pytest.skip("openenv is not installed; `make test` does it, or pip install 'rollart[openenv]'")
    port = free_port()
    with subprocess.Popen([python, "-m", "tests.unit.openenv_counting", str(port)], cwd=ROOT) as process:
        try:
            end = time.monotonic() + START_DEADLINE_S
            while time.monotonic() < end:
                assert process.poll() is None, "the server ended"
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            else:
                pytest.fail(f"OpenEnv's server did not answer within {START_DEADLINE_S} s")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make(*addresses: str, family: dict[str, Any] | None = None, **arguments: Any) -> Environment:
    config = FamilyConfig.model_validate(
        {
            "environment": "openenv",
            "arguments": {"addresses": list(addresses), **arguments},
            "hardware_class": "compute",
            **(family or {}),
        }
    )
    return make_environment(config, family="count")


@pytest.fixture(params=["ours", "openenv's"])
def on_server(request: pytest.FixtureRequest) -> Callable[[Callable[[str], Awaitable[None]]], None]:
    """Runs a scenario with the address of a server: the contract of both."""
    if request.param == "openenv's":
        address = request.getfixturevalue("openenvs_server")

        async def with_theirs(scenario: Callable[[str], Awaitable[None]]) -> None:
            await scenario(address)

        return lambda scenario: asyncio.run(with_theirs(scenario))

    async def with_ours(scenario: Callable[[str], Awaitable[None]]) -> None:
        async with CountingServer(capacity=2).running() as server:
            await scenario(server.address)

    return lambda scenario: asyncio.run(with_ours(scenario))


async def episode(environment: Environment, seed: int, actions: list[str]) -> tuple[list[Message], list[StepOutcome]]:
    try:
        opening = await environment.reset(seed)
        return opening, [await environment.step(action) for action in actions]
    finally:
        await environment.close()


def start_of(opening: list[Message]) -> int:
    return int(opening[-1]["content"].removeprefix("count on from "))


def test_an_episode_is_played_and_the_same_seed_gives_the_same_one(on_server: Any) -> None:
    async def scenario(address: str) -> None:
        opening, _ = await episode(make(address, instruction="count"), 5, [])
        assert opening[0] == {"role": "system", "content": "count"}
        first = start_of(opening)
        actions = [str(first + each) for each in (1, 2, 3)]
        _, outcomes = await episode(make(address), 5, actions)
        assert [each.reward for each in outcomes] == [0.1, 0.1, 1.0]
        assert outcomes[0].observation == [{"role": "user", "content": "go on"}]
        end = outcomes[-1]
        assert (end.terminated, end.truncated, end.success, end.observation) == (True, False, True, [])
        assert await episode(make(address), 5, actions) == await episode(make(address), 5, actions)
        starts = {start_of((await episode(make(address), seed, []))[0]) for seed in range(8)}
        assert len(starts) > 1
        _, (wrong,) = await episode(make(address), 5, ["nothing"])
        assert (wrong.reward, wrong.terminated, wrong.success) == (0.0, True, False)

    on_server(scenario)


def test_the_ends_are_kept_apart(on_server: Any) -> None:
    async def scenario(address: str) -> None:
        _, (cut,) = await episode(make(address), 5, ["cut"])
        assert (cut.terminated, cut.truncated) == (False, True)
        environment = make(address, max_turns=1)
        first = start_of(await environment.reset(5))
        limit = await environment.step(str(first + 1))
        await environment.close()
        assert (limit.terminated, limit.truncated, limit.reward) == (False, True, 0.1)
        _, (scored,) = await episode(make(address, solved_reward=0.0), 5, ["nothing"])
        assert scored.success

    on_server(scenario)


def test_a_json_action_may_be_malformed_here_or_there(on_server: Any) -> None:
    async def scenario(address: str) -> None:
        environment = make(address, action="json", max_turns=8)
        first = start_of(await environment.reset(5))
        texts = ["4", '<act>{"message":</act>', "<act>[1]</act>", "<act>{}</act>", '<act>{"message": 4}</act>']
        for text in texts:
            outcome = await environment.step(text)
            assert outcome.invalid_action and outcome.reward == -0.1 and not outcome.terminated
            assert outcome.observation[0]["content"].startswith("error: ")
        right = await environment.step(json.dumps({"message": str(first + 1), "loud": True}).join(("<act>", "</act>")))
        assert right.observation[0]["content"] == "louder"
        await environment.close()

    on_server(scenario)


def test_what_the_server_raises_is_the_environments_failure(on_server: Any) -> None:
    async def scenario(address: str) -> None:
        with pytest.raises(EnvironmentFailure, match="step with EXECUTION_ERROR: the counter is broken"):
            await episode(make(address), 5, ["break"])
        with pytest.raises(EnvironmentFailure, match="VALIDATION_ERROR"):  # the run file names a wrong field
            await episode(make(address, action_field="text"), 5, ["4"])
        with pytest.raises(EnvironmentFailure, match=r"sent no 'board'; its observation has \['text'\]"):
            await episode(make(address, observation_field="board"), 5, [])

    on_server(scenario)


def test_a_full_server_is_waited_for_and_named_when_it_stays_full(on_server: Any) -> None:
    async def scenario(address: str) -> None:
        playing = [make(address), make(address)]
        for environment in playing:
            await environment.reset(1)
        waiting = make(address)
        entering = asyncio.create_task(waiting.reset(2))
        await asyncio.sleep(0.3)
        assert not entering.done()
        for environment in playing:
            await environment.close()
        assert start_of(await entering)
        rejected = make(address, full_deadline_s=0)
        other = make(address)
        await other.reset(3)
        with pytest.raises(EnvironmentFailure, match="no OpenEnv server took the episode: .* (is full|closed before)"):
            await rejected.reset(4)
        await other.close()
        await waiting.close()

    on_server(scenario)


def test_a_schema_refuses_an_action_before_it_is_sent() -> None:
    async def main() -> None:
        async with CountingServer().running() as server:
            schema = {"type": "object", "properties": {"message": {"maxLength": 3}}, "required": ["message"]}
            _, outcomes = await episode(
                make(server.address, action="json", action_schema=schema), 5,
                ['<act>{"message": "vanish"}</act>', "<act>{}</act>"],
            )  # fmt: skip
            assert "message: 'vanish' is too long" in outcomes[0].observation[0]["content"]
            assert "'message' is a required property" in outcomes[1].observation[0]["content"]

    asyncio.run(main())


def test_episodes_go_round_and_pass_over_a_server_that_is_gone() -> None:
    async def main() -> None:
        async with CountingServer().running() as one, CountingServer().running() as other:
            addresses = [one.address, f"ws://127.0.0.1:{free_port()}", other.address]
            for seed in range(6):
                await episode(make(*addresses), seed, [])
            assert (one.num_served, other.num_served) == (2, 4)
        environment = make(f"ws://127.0.0.1:{free_port()}")
        with pytest.raises(EnvironmentFailure, match="no OpenEnv server took the episode: .* takes no connection"):
            await environment.reset(0)

    asyncio.run(main())


def test_a_connection_that_is_lost_fails_the_episode_and_the_next_one_connects_anew() -> None:
    async def main() -> None:
        async with CountingServer().running() as server:
            with pytest.raises(EnvironmentFailure, match="broke off during step"):
                await episode(make(server.address), 5, ["vanish"])
            assert start_of((await episode(make(server.address), 5, []))[0])
            assert server.num_served == 2

    asyncio.run(main())


def test_a_step_that_hangs_ends_at_the_familys_deadline() -> None:
    async def main() -> None:
        async with CountingServer().running() as server:
            environment = make(server.address, family={"step_deadline_s": 0.2})
            await environment.reset(5)
            with pytest.raises(EnvironmentFailure, match=r"count: step did not return within 0.2 s"):
                await environment.step("sleep")
            await environment.close()

    asyncio.run(main())


def test_a_server_that_speaks_something_else_is_a_failure() -> None:
    async def chat(connection: ServerConnection) -> None:
        async for _ in connection:
            await connection.send("hello")

    async def main() -> None:
        async with serve(chat, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            with pytest.raises(EnvironmentFailure, match="does not speak OpenEnv"):
                await make(f"ws://127.0.0.1:{port}").reset(0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"addresses": []}, "must be a list of at least one"),
        ({"addresses": ["127.0.0.1:8000"]}, "addresses holds '127.0.0.1:8000'"),
        ({"addresses": ["ws://x:1"], "action": "tool"}, "action is 'tool'; it must be 'text' or 'json'"),
        ({"addresses": ["ws://x:1"], "action_schema": {"type": "thing"}}, "action_schema is no JSON schema"),
    ],
)
def test_what_cannot_work_is_said_when_it_is_loaded(arguments: dict[str, Any], message: str) -> None:
    config = FamilyConfig(environment="openenv", arguments=arguments, hardware_class="compute")
    with pytest.raises(ValueError, match=message):
        make_environment(config)
