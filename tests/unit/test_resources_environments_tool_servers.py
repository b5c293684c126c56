"""Tools behind HTTP: servers that are down, full, slow, or lose a session; how an environment is served."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

import httpx
import pytest

from resources.environments.base import Environment
from resources.environments.deadline import DeadlineEnvironment
from resources.environments.family import FamilyConfig
from resources.environments.registry import make_environment
from resources.environments.threads import DaemonThreads
from resources.environments.tools.addresses import check_addresses, in_turn
from resources.environments.tools.service import ToolService, maker
from resources.environments.tools.tool_server import ToolServerEnvironment
from resources.failures import EnvironmentFailure
from tests.unit.tool_environments import Quotients, call, play


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
