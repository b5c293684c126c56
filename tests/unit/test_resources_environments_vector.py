"""Steps taken together give, bit by bit, what steps taken one by one give; and their failures stay with them."""

from __future__ import annotations

import asyncio
import random

import pytest

from resources.environments.base import Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.environments.frozen_lake import FrozenLake
from resources.environments.registry import make_environment
from resources.environments.vector import StepTogether, VectorEnvironment
from resources.failures import EnvironmentFailure


def lake_actions(lake: FrozenLake, rng: random.Random) -> str:
    """Mostly valid ones, the expert's among them, and nonsense."""
    return rng.choice([lake.random_action(rng), lake.expert_action(), "<act>jump</act>", "left"])


def test_lakes_step_together_as_they_step_alone() -> None:
    """50 lakes of two sizes, to their ends: outcomes, then states, equal after every step."""

    async def main() -> None:
        rng = random.Random(0)
        sizes = [rng.choice((4, 6)) for _ in range(50)]
        alone, together = ([FrozenLake(size=size, max_turns=12) for size in sizes] for _ in range(2))
        for index, (one, other) in enumerate(zip(alone, together, strict=True)):
            assert await one.reset(index) == await other.reset(index)
        playing = list(range(50))
        while playing:
            actions = [lake_actions(alone[index], rng) for index in playing]
            expected = [await alone[index].step(action) for index, action in zip(playing, actions, strict=True)]
            found = await FrozenLake.step_many([together[index] for index in playing], actions)
            assert found == expected
            assert [together[i].expert_action() for i in playing] == [alone[i].expert_action() for i in playing]
            ended = [outcome.terminated or outcome.truncated for outcome in found]
            playing = [index for index, is_over in zip(playing, ended, strict=True) if not is_over]
            for index in playing[:3]:  # and one by one in between
                action = lake_actions(alone[index], rng)
                outcome = await alone[index].step(action)
                assert await together[index].step(action) == outcome
                if outcome.terminated or outcome.truncated:
                    playing.remove(index)

    asyncio.run(main())


class Counting:
    """Counts; "fail" breaks the whole call, "short" loses an outcome."""

    env_version = "1"
    max_turns = 9

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reset(self, seed: int) -> list[Message]:
        return [Message(role="user", content=str(seed))]

    def step(self, action: str) -> StepOutcome:
        return self.step_many([self], [action])[0]

    @classmethod
    def step_many(cls, environments, actions) -> list[StepOutcome]:
        if "fail" in actions:
            raise RuntimeError("out of cheese")
        for environment, action in zip(environments, actions, strict=True):
            environment.heard.append(action)
        outcomes = [StepOutcome([Message(role="user", content=str(len(e.heard)))]) for e in environments]
        return outcomes[1:] if "short" in actions else outcomes


class Alone:
    env_version = "1"
    max_turns = 9

    def reset(self, seed: int) -> list[Message]:
        return [Message(role="user", content="go")]

    def step(self, action: str) -> StepOutcome:
        return StepOutcome([], terminated=True)


def environments(number: int, together: StepTogether, cls: type = Counting) -> list:
    family = FamilyConfig(environment=f"{cls.__module__}:{cls.__name__}", hardware_class="compute")
    return [make_environment(family, family="counting", together=together) for _ in range(number)]


def test_steps_of_one_moment_are_one_call() -> None:
    async def main() -> None:
        together = StepTogether()
        played = environments(5, together)
        for turn in (1, 2):
            outcomes = await asyncio.gather(*(e.step("x") for e in played))
            assert [outcome.observation[0]["content"] for outcome in outcomes] == [str(turn)] * 5
        assert (together.num_calls, together.num_steps) == (2, 10)
        await environments(1, together, Alone)[0].step("x")
        assert together.num_calls == 2, "a class that does not offer it steps by itself"

    assert isinstance(FrozenLake(), VectorEnvironment) and not isinstance(Alone(), VectorEnvironment)
    asyncio.run(main())


@pytest.mark.parametrize(("action", "message"), [("fail", "out of cheese"), ("short", "2 outcomes for 3 environments")])
def test_a_call_that_fails_fails_its_steps_and_no_other(action: str, message: str) -> None:
    async def main() -> None:
        together = StepTogether()
        played = environments(3, together)
        failures = await asyncio.gather(*(e.step(action) for e in played), return_exceptions=True)
        assert all(isinstance(failure, EnvironmentFailure) and message in str(failure) for failure in failures)
        other = environments(1, together)[0]
        assert (await other.step("x")).observation[0]["content"] == "1"

    asyncio.run(main())


def test_a_cancelled_step_does_not_hold_up_the_others() -> None:
    async def main() -> None:
        played = environments(2, StepTogether())
        steps = [asyncio.ensure_future(e.step("x")) for e in played]
        await asyncio.sleep(0)
        steps[0].cancel()
        assert (await steps[1]).observation
        assert steps[0].cancelled()

    asyncio.run(main())
