"""Batch stepping: turns are taken together, and nothing that hangs, fails or ends holds the others for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from resources.environments.family import FamilyConfig
from resources.failures import EngineFailure, EnvironmentFailure
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.env_manager import EnvManager
from resources.rollout.episode_services import EpisodeServices
from resources.rollout.messages import Assignment
from resources.rollout.stepping import BatchStepping, TrajectoryStepping
from tests.unit.test_resources_rollout_env_manager import EchoEnvironment, LetterFormat, ScriptedGenerator

FAMILY = FamilyConfig(environment="echo", hardware_class="compute", max_new_tokens=8)


class HeldGenerator(ScriptedGenerator):
    """Answers when the test says so, by trajectory: with text, or with an error."""

    def __init__(self):
        super().__init__()
        self.held: dict[str, asyncio.Future[str]] = {}

    async def generate(self, request, hardware_class):
        answer = self.held[request.trajectory_id.split("/")[1][-1]] = asyncio.get_running_loop().create_future()
        text = await answer
        self.answers = [(text, "stop", 0)]
        return await super().generate(request, hardware_class)


class HeldEnvironment(EchoEnvironment):
    """Its reset and steps end when the test says so; a deadline that passes is an EnvironmentFailure, as in a run."""

    max_turns = 3

    def __init__(self, name: str, calls: dict[str, asyncio.Future[None]]):
        super().__init__()
        self.name, self.calls = name, calls

    async def _held(self):
        held = self.calls[self.name] = asyncio.get_running_loop().create_future()
        await held
        del self.calls[self.name]

    async def reset(self, seed):
        await self._held()
        return await super().reset(seed)

    async def step(self, action):
        await self._held()
        return await super().step(action)


class Wave:
    """Trajectories of one worker, played by real EnvManagers; the test is their engine, environments and clock."""

    def __init__(self, stepping):
        self.generator = HeldGenerator()
        self.calls: dict[str, asyncio.Future[None]] = {}
        """Environments that are resetting or stepping."""
        self.now = 0.0
        self.stepping = stepping
        self.managers: dict[str, EnvManager] = {}
        self.tasks: dict[str, asyncio.Task] = {}

    async def start(self, *names: str, split="train") -> None:
        for name in names:
            services = EpisodeServices(
                chat=EncodingCache(LetterFormat()), proxy=self.generator, context_length=200, stepping=self.stepping,
                make_environment=lambda family, config, name=name: HeldEnvironment(name, self.calls),
                clock=lambda: self.now,
            )  # fmt: skip
            assignment = Assignment("run", "echo", f"echo-{name}", 0, 0, 1, 11, 22, split=split)
            self.managers[name] = EnvManager(assignment, FAMILY, services)
            self.tasks[name] = asyncio.create_task(self.managers[name].play())
        await settle()

    @property
    def generating(self) -> set[str]:
        return {name for name, answer in self.generator.held.items() if not answer.done()}

    @property
    def in_environment(self) -> set[str]:
        return set(self.calls)

    async def observe(self, *names: str, error: Exception | None = None) -> None:
        """Let environments answer."""
        for name in names:
            if error is None:
                self.calls[name].set_result(None)
            else:
                self.calls.pop(name).set_exception(error)
        await settle()

    async def answer(self, *names: str, text="a", error: Exception | None = None) -> None:
        """Let the engine answer."""
        for name in names:
            held = self.generator.held[name]
            held.set_result(text) if error is None else held.set_exception(error)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def scene(play: Callable[[Wave], Coroutine], stepping=BatchStepping) -> Wave:
    async def main():
        wave = Wave(stepping())
        try:
            await play(wave)
        finally:
            for task in wave.tasks.values():
                task.cancel()
            await asyncio.gather(*wave.tasks.values(), return_exceptions=True)
        return wave

    return asyncio.run(main())


def test_all_generate_together_and_all_step_together():
    async def play(wave: Wave):
        await wave.start("a", "b", "c")
        await wave.observe("a", "b")
        assert not wave.generating, "c has no observation yet"
        await wave.observe("c")
        assert wave.generating == {"a", "b", "c"}
        await wave.answer("a", "c")
        assert not wave.in_environment, "b still generates"
        await wave.answer("b")
        assert wave.in_environment == {"a", "b", "c"}
        await wave.observe("c", "a")
        assert not wave.generating
        await wave.observe("b")
        assert wave.generating == {"a", "b", "c"} and wave.stepping.num_turns == 2

    scene(play)


def test_by_default_nobody_waits_for_anybody():
    """The negative control of the test above."""

    async def play(wave: Wave):
        await wave.start("a", "b")
        await wave.observe("a")
        assert wave.generating == {"a"}
        await wave.answer("a")
        assert wave.in_environment == {"a", "b"}

    scene(play, TrajectoryStepping)


@pytest.mark.parametrize("how", ["deadline", "cancelled", "finished", "the worker ends"])
def test_one_that_hangs_in_its_environment_leaves_and_the_others_go_on(how: str):
    async def play(wave: Wave):
        await wave.start("a", "b")
        await wave.observe("a", "b")
        await wave.answer("a", text="x")
        await wave.answer("b", text="win" if how == "finished" else "x")
        await wave.observe("a")
        assert not wave.generating and wave.in_environment == {"b"}
        assert wave.managers["a"].stage == "others", "what a waits for has a name"
        wave.now += 30.0
        match how:
            case "deadline":
                await wave.observe("b", error=EnvironmentFailure("echo: step did not return within 30 s"))
            case "finished":
                await wave.observe("b")
            case "cancelled":
                wave.managers["b"].cancel("evicted_stale")
            case _:
                wave.tasks["b"].cancel()
        await settle()
        assert wave.generating == {"a"} and wave.tasks["b"].done()
        await wave.answer("a", text="win")
        await wave.observe("a")
        trajectory = await wave.tasks["a"]
        assert trajectory.success and trajectory.environment_s == 0.0, (
            "waiting for others is not the environment's time"
        )

    scene(play)


def test_a_generation_that_fails_leaves_too_and_one_that_waits_may_be_cancelled():
    async def play(wave: Wave):
        await wave.start("a", "b", "c")
        await wave.observe("a", "b", "c")
        await wave.answer("a")
        wave.managers["a"].cancel("preempted")
        await settle()
        assert wave.tasks["a"].done() and not wave.in_environment
        await wave.answer("b")
        await wave.answer("c", error=EngineFailure("2 engines failed"))
        assert wave.tasks["c"].result().failure_message == "2 engines failed"
        assert wave.in_environment == {"b"}

    scene(play)


def test_one_that_joins_in_the_middle_of_a_turn_takes_part_from_the_next_on():
    async def play(wave: Wave):
        await wave.start("a", "b")
        await wave.observe("a", "b")
        await wave.start("c")
        await wave.answer("a", "b")
        assert wave.in_environment == {"a", "b", "c"}, "its reset holds up no step"
        await wave.observe("a", "b")
        assert not wave.generating, "but the next generation waits for it"
        await wave.observe("c")
        assert wave.generating == {"a", "b", "c"}

    scene(play)


def test_evaluation_waits_for_nobody_and_nobody_for_it():
    async def play(wave: Wave):
        await wave.start("a", "b")
        await wave.start("e", split="eval")
        await wave.observe("e")
        assert wave.generating == {"e"}
        await wave.observe("a", "b")
        await wave.answer("e")
        assert wave.generating == {"a", "b"} and wave.in_environment == {"e"}

    scene(play)
