"""What the proxy does with each fault of an engine: simulated engines behind real exchanges, on a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resources.clock import ManualClock
from resources.engines.actor import EngineActor
from resources.engines.base import GenerateRequest, Generation, SamplingParams
from resources.engines.simulated_config import Fault
from resources.failures import EngineFailure
from resources.pools.actors import call
from resources.rollout.config import RolloutConfig
from resources.rollout.proxy import LLMProxy
from tests.unit.test_resources_engines_simulated import engine, pass_time, settle

FIRST = "compute-0"


class Pair:
    """Two engines of one class; the faults are on the first, which requests without a home prefer."""

    def __init__(self, directory: Path, *faults: Fault) -> None:
        self.clock = ManualClock()
        self.first = engine(directory, self.clock, faults=faults)
        self.second = engine(directory, self.clock)
        self.second.name = self.second._batch.engine = "compute-1"
        actors = [(one.name, EngineActor.around(one)) for one in (self.first, self.second)]
        config = RolloutConfig(generate_deadline_s=60.0, engine_poll_s=0.05)
        self.proxy = LLMProxy("p", {"compute": actors}, config, call=call)

    def ask(self, name: str, new_tokens: int = 12) -> asyncio.Task[Generation]:
        prompt = np.arange(10, dtype=np.int32) + ord(name)
        sampling = SamplingParams(max_new_tokens=new_tokens)
        return asyncio.ensure_future(
            self.proxy.generate(GenerateRequest(f"r-{name}", name, prompt % 100, sampling, seed=ord(name)), "compute")
        )

    async def alone(self, name: str, new_tokens: int = 12) -> Generation:
        """What an engine without faults gives."""
        task = self.ask(name, new_tokens)
        await pass_time(self.clock, 100.0)
        return await task

    async def close(self) -> None:
        await self.proxy.close()
        for one in (self.first, self.second):
            await one.close()


def play(directory: Path, scenario: Callable[[Pair], Coroutine[Any, Any, None]], *faults: Fault) -> None:
    async def bounded() -> None:
        pair = Pair(directory, *faults)
        async with asyncio.timeout(20):
            await scenario(pair)
            await pair.close()

    asyncio.run(bounded())


def whole(directory: Path, name: str) -> list[int]:
    answers: list[int] = []

    async def scenario(pair: Pair) -> None:
        answers.extend((await pair.alone(name)).token_ids.tolist())

    play(directory, scenario)
    return answers


def test_a_crash_sends_requests_to_another_engine_with_the_tokens_kept(tmp_path: Path) -> None:
    expected = whole(tmp_path, "a")

    async def scenario(pair: Pair) -> None:
        task = pair.ask("a")
        await pass_time(pair.clock, 1.2)  # prefill and seven more tokens, then the crash
        await pass_time(pair.clock, 100.0)
        generation = await task
        assert generation.engine == "compute-1" and generation.finish_reason == "length"
        assert generation.token_ids.tolist() == expected, "the other engine went on where the first one was"
        assert generation.versions.tolist() == [3] * 12
        stats = pair.proxy.stats()
        assert (stats["num_rerouted"], stats["num_rescued_tokens"]) == (1, 7)
        again = pair.ask("b")
        await pass_time(pair.clock, 100.0)
        assert (await again).engine == "compute-1"

    play(tmp_path, scenario, Fault(kind="crash", engine=FIRST, after_s=1.05))


def test_a_hang_ends_by_the_deadline_of_a_generation(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        task = pair.ask("a")
        await pass_time(pair.clock, 1000.0)
        assert not task.done()
        pair.proxy.age_requests(59.0)
        await settle()
        assert not task.done()
        pair.proxy.age_requests(2.0)
        await settle()
        await pass_time(pair.clock, 100.0)
        generation = await task
        assert generation.engine == "compute-1" and len(generation.token_ids) == 12

    play(tmp_path, scenario, Fault(kind="hang", engine=FIRST, after_s=0.0))


def test_a_slow_engine_is_waited_for(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        task = pair.ask("a")
        await pass_time(pair.clock, 3.0)
        assert not task.done(), "1.6 s without the fault"
        await pass_time(pair.clock, 2.0)
        generation = await task
        assert generation.engine == FIRST and generation.prefill_s + generation.decode_s == pytest.approx(4.8)
        assert pair.proxy.stats()["num_rerouted"] == 0

    play(tmp_path, scenario, Fault(kind="slow", engine=FIRST, after_s=0.0, factor=3.0))


def test_a_version_that_was_never_loaded_is_refused(tmp_path: Path) -> None:
    """No row may claim it: the answer is dropped, and another engine gives one."""
    expected = whole(tmp_path, "a")

    async def scenario(pair: Pair) -> None:
        task = pair.ask("a")
        await pass_time(pair.clock, 100.0)
        await pass_time(pair.clock, 100.0)
        generation = await task
        assert generation.engine == "compute-1" and generation.versions.tolist() == [3] * 12
        assert generation.token_ids.tolist() == expected
        of_first = pair.proxy.stats()["engines"][FIRST]
        assert of_first["num_refused"] == 1
        assert "claims versions 4 to 4, but it holds version 3: the tokens are refused" in of_first["last_error"]

    play(tmp_path, scenario, Fault(kind="wrong_version", engine=FIRST, after_s=0.0))


def test_a_request_that_no_engine_answers_rightly_fails_with_every_cause(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        task = pair.ask("a")
        await settle()
        await pair.second.close()
        for _ in range(4):
            await pass_time(pair.clock, 100.0)
        with pytest.raises(EngineFailure, match="3 engines failed on a request of a: .*refused.*was closed.*refused"):
            await task

    play(tmp_path, scenario, Fault(kind="wrong_version", engine=FIRST, after_s=0.0))
