"""Environments in child processes: played, killed at their deadlines, replaced, bounded, and gone at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from resources.environments.base import Environment, ScriptedExpert
from resources.environments.family import FamilyConfig
from resources.environments.processes import ChildProcesses
from resources.environments.registry import make_environment
from resources.failures import EnvironmentFailure, FailureClass

HERE = "tests.unit.process_environments"


def family(name: str = "Obedient", *, processes: dict[str, Any] | None = None, **settings: Any) -> FamilyConfig:
    arguments = settings.pop("arguments", {})
    return FamilyConfig.model_validate(
        {
            "environment": f"{HERE}:{name}",
            "arguments": arguments,
            "hardware_class": "compute",
            "executor": "process",
            "processes": processes or {},
            **settings,
        }
    )


def play(
    config: FamilyConfig, scenario: Callable[[Callable[[], Environment], ChildProcesses], Awaitable[None]]
) -> None:
    """Run a scenario with a maker of environments that share one pool; nothing of the pool outlives it."""

    async def main() -> None:
        children = ChildProcesses("mine", config)
        try:
            await scenario(lambda: make_environment(config, family="mine", children=children), children)
        finally:
            pids = children.pids
            await children.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(main())


async def judgement_of(environment: Environment) -> dict[str, Any]:
    payload: Any = environment.judgement()
    return await payload


@pytest.mark.parametrize("name", ["Obedient", "Coroutines"])
def test_an_episode_in_a_child_is_the_same_episode(name: str) -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        environment = make()
        assert (environment.env_version, environment.max_turns) == ("7", 9)
        assert not isinstance(environment, ScriptedExpert)
        assert await environment.reset(4) == [{"role": "user", "content": "hi 4"}]
        outcome = await environment.step("go")
        assert outcome.observation == [{"role": "tool", "content": "1", "tool_call_id": "call_1", "name": "count"}]
        assert (outcome.reward, outcome.terminated, outcome.truncated) == (0.5, False, False)
        assert (await environment.step("use a signal")).reward == 0.5
        assert (await environment.step("end")).terminated
        judgement = await judgement_of(environment)
        assert judgement == {"pid": children.pids[0], "num_steps": 3, "heavy": []}
        assert judgement["pid"] != os.getpid()
        await environment.close()

    play(family(name, arguments={"greeting": "hi"}), scenario)


def test_a_child_plays_one_episode_after_the_other() -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        for seed in range(3):
            environment = make()
            await environment.reset(seed)
            await environment.close()
        assert len(children.pids) == 1

    play(family(), scenario)


def test_a_call_that_hangs_is_killed_at_its_deadline_and_the_next_episode_gets_a_new_child() -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        environment = make()
        await environment.reset(0)
        (pid,) = children.pids
        with pytest.raises(EnvironmentFailure, match=r"mine: step did not return within 1 s; its process was killed"):
            await environment.step("hang")
        await environment.close()
        other = make()
        await other.reset(1)
        assert (await other.step("go")).reward == 0.5
        assert children.pids != [pid]

    play(family(step_deadline_s=1, processes={"max_processes": 1}), scenario)


def test_a_reset_that_hangs_is_killed() -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        with pytest.raises(EnvironmentFailure, match="reset did not return within 1.5 s; its process was killed"):
            await make().reset(0)
        assert children.pids == []

    play(family(arguments={"greeting": "hang"}, reset_deadline_s=1.5), scenario)


def test_a_killed_child_takes_what_it_started_with_it() -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        environment = make()
        await environment.reset(0)
        grandchild = int((await environment.step("start")).observation[0]["content"])
        with pytest.raises(EnvironmentFailure):
            await environment.step("hang")
        async with asyncio.timeout(20):
            while is_running(grandchild):
                await asyncio.sleep(0.01)

    play(family(step_deadline_s=1), scenario)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", "the environment raised LookupError: no such room"),
        ("exit", "the environment's process broke off"),
        ("nonsense", "a object is no JSON"),
        ("no outcome", "step returned 'done', not StepOutcome"),
    ],
)
def test_what_goes_wrong_inside_is_a_failure_of_the_environment(action: str, message: str) -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        environment = make()
        await environment.reset(0)
        with pytest.raises(EnvironmentFailure, match=message) as caught:
            await environment.step(action)
        assert caught.value.failure_class is FailureClass.ENVIRONMENT
        await environment.close()
        other = make()
        await other.reset(1)
        assert (await other.step("go")).observation[0]["content"] == "1"

    play(family(processes={"max_processes": 1}), scenario)


def test_a_child_that_is_killed_from_outside_is_replaced() -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        environment = make()
        await environment.reset(0)
        os.kill(children.pids[0], signal.SIGKILL)
        with pytest.raises(EnvironmentFailure, match="mine: the environment's process"):
            await environment.step("go")
        await environment.close()
        other = make()
        await other.reset(1)
        await other.close()

    play(family(processes={"max_processes": 1}), scenario)


def test_an_environment_that_cannot_be_made_in_the_child_says_why() -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        with pytest.raises(EnvironmentFailure, match="no data in this process"):
            await make().reset(0)

    play(family("NotForChildren", arguments={"maker": os.getpid()}), scenario)


def test_no_more_children_than_allowed_and_the_next_episode_waits_for_room() -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        playing = [make() for _ in range(4)]
        await asyncio.gather(*(environment.reset(0) for environment in playing))
        assert len(children.pids) == 2
        waiting = asyncio.create_task((late := make()).reset(5))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await playing[0].close()
        assert (await waiting)[0]["content"] == "hello 5"
        # Two episodes in one child do not mix.
        assert [(await each.step("go")).observation[0]["content"] for each in (late, playing[1], late)] == [
            "1",
            "1",
            "2",
        ]
        for environment in (late, *playing[1:]):
            await environment.close()

    play(family(processes={"max_processes": 2, "episodes_per_process": 2}), scenario)


def test_without_room_in_time_the_message_says_what_to_change() -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        await make().reset(0)
        with pytest.raises(
            EnvironmentFailure, match=r"1 processes with 1 episodes each .* 0.05 s; raise processes.max"
        ):
            await make().reset(1)

    play(family(processes={"max_processes": 1, "slot_deadline_s": 0.05}), scenario)


def test_a_cancelled_call_keeps_its_deadline_and_a_child_that_answers_in_time_its_life() -> None:
    async def scenario(make: Callable[[], Environment], children: ChildProcesses) -> None:
        quick = make()
        await quick.reset(0)
        (pid,) = children.pids
        step = asyncio.create_task(quick.step("go"))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await quick.close()  # after the call that is still under way
        assert children.pids == [pid]
        slow = make()
        await slow.reset(1)
        step = asyncio.create_task(slow.step("hang"))
        await asyncio.sleep(0.05)
        step.cancel()
        with pytest.raises(EnvironmentFailure, match="its process was killed"):
            await slow.close()
        assert children.pids == []

    play(family(step_deadline_s=2, processes={"max_processes": 1}), scenario)


PARENT_THAT_WAITS = """
import asyncio
from resources.environments.family import FamilyConfig
from resources.environments.processes import ChildProcesses
from resources.environments.registry import make_environment

async def main():
    config = FamilyConfig(environment="tests.unit.process_environments:Obedient", hardware_class="compute")
    children = ChildProcesses("mine", config)
    environment = make_environment(config, children=children)
    await environment.reset(0)
    print(children.pids[0], flush=True)
    await environment.step("hang")

asyncio.run(main())
"""


def test_a_child_does_not_outlive_a_parent_that_is_killed() -> None:
    """In the middle of a call that hangs."""
    with subprocess.Popen([sys.executable, "-c", PARENT_THAT_WAITS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = (line for line in parent.stdout if line.strip().isdigit())  # the environment prints, too
        child = int(next(lines))
        assert is_running(child)
        parent.kill()
    end = time.monotonic() + 20
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(child)
