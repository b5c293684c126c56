"""What every engine owes its callers, whichever back end it is (`resources.engines.base.Engine`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resources.engines.base import GenerateRequest, SamplingParams
from resources.engines.exchange import HostedEngine
from resources.failures import EngineFailure
from tests.contracts.engine_backends import BACKENDS, CONTEXT_LENGTH, NUM_SLOTS, UNPUBLISHED_VERSION, Backend
from tests.model_directories import VOCAB_SIZE, write_model

DEADLINE_S = 60.0
"""Nothing here takes a second; an engine that hangs fails its test by this deadline."""

Scenario = Callable[[HostedEngine], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture
def play(backend: Backend, directory: Path) -> Callable[[Scenario], None]:
    """Run a scenario against a fresh engine at version 3, within the deadline."""

    @asynccontextmanager
    async def engine() -> AsyncIterator[HostedEngine]:
        built = await asyncio.to_thread(backend.build, directory, 3)
        try:
            yield built
        finally:
            await built.close()

    async def run(scenario: Scenario) -> None:
        async with engine() as built, asyncio.timeout(DEADLINE_S):
            await scenario(built)

    return lambda scenario: asyncio.run(run(scenario))


def ask(name: str, length: int = 10, *, seed: int = 0, **sampling: Any) -> GenerateRequest:
    token_ids = np.random.default_rng(len(name)).integers(2, VOCAB_SIZE, length).astype(np.int32)
    return GenerateRequest(f"r-{name}", name, token_ids, SamplingParams(**sampling), seed)


async def until(condition: Callable[[Any], bool], engine: HostedEngine) -> None:
    while not condition(await engine.stats()):
        await asyncio.sleep(0.002)


def test_a_generation_is_complete(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: HostedEngine) -> None:
        generation = await engine.generate(ask("a", max_new_tokens=7))
        assert (generation.request_id, generation.trajectory_id) == ("r-a", "a")
        assert generation.finish_reason == "length" and generation.error is None
        assert generation.token_ids.dtype == np.int32 and generation.token_ids.shape == (7,)
        assert generation.logprobs.dtype == np.float32 and generation.logprobs.shape == (7,)
        assert (generation.logprobs <= 0).all() and np.isfinite(generation.logprobs).all()
        assert generation.versions.dtype == np.int32 and generation.versions.tolist() == [3] * 7
        assert (generation.engine, generation.hardware_class) == (engine.name, engine.hardware_class)
        stats = await engine.stats()
        assert (stats.version, stats.generated_tokens, stats.num_running, stats.num_waiting) == (3, 7, 0, 0)

    play(scenario)


def test_the_same_seed_gives_the_same_tokens(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: HostedEngine) -> None:
        first = await engine.generate(ask("a", seed=5, max_new_tokens=12))
        others = [engine.generate(ask(f"o{i}", 5 + i, seed=i, max_new_tokens=9)) for i in range(5)]
        again, *_ = await asyncio.gather(engine.generate(ask("b", seed=5, max_new_tokens=12)), *others)
        assert again.token_ids.tolist() == first.token_ids.tolist()

    play(scenario)


def test_more_requests_than_slots_are_all_answered(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: HostedEngine) -> None:
        many = 4 * NUM_SLOTS
        asked = [engine.generate(ask(f"t{i}", 4 + i, seed=i, max_new_tokens=1 + i % 5)) for i in range(many)]
        answers = await asyncio.gather(*asked)
        assert [len(answer.token_ids) for answer in answers] == [1 + i % 5 for i in range(many)]

    play(scenario)


def test_a_turn_reuses_what_the_turn_before_left(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: HostedEngine) -> None:
        request = ask("a", 40, max_new_tokens=6)
        first = await engine.generate(request)
        longer = np.concatenate([request.token_ids, first.token_ids, request.token_ids[:5]])
        second = await engine.generate(GenerateRequest("r2", "a", longer, request.sampling, 0))
        assert second.cached_tokens >= 40
        await engine.release("a")
        await engine.release("never-seen")

    play(scenario)


def test_a_prompt_that_fills_the_context_ends_cleanly(play: Callable[[Scenario], None]) -> None:
    """S15 and M23: what fits is sampled; a prompt at or over the limit gives an empty generation, not an error."""

    async def scenario(engine: HostedEngine) -> None:
        fits = await engine.generate(ask("a", 400, max_new_tokens=200))
        assert (len(fits.token_ids), fits.finish_reason) == (CONTEXT_LENGTH - 400, "context")
        for length in (CONTEXT_LENGTH, CONTEXT_LENGTH + 3):
            full = await engine.generate(ask(f"b{length}", length, max_new_tokens=5))
            assert (len(full.token_ids), full.finish_reason, full.error) == (0, "context", None)
        nothing = await engine.generate(ask("c", max_new_tokens=0))
        assert (len(nothing.token_ids), nothing.finish_reason) == (0, "length")

    play(scenario)


def test_a_request_that_arrives_while_suspended_waits(play: Callable[[Scenario], None]) -> None:
    """S27: it waits, is not lost, and is sampled under the version loaded meanwhile."""

    async def scenario(engine: HostedEngine) -> None:
        await engine.suspend()
        waiting = asyncio.ensure_future(engine.generate(ask("a", max_new_tokens=3)))
        await engine.prefetch(4)
        report = await engine.load(4)
        assert report.version == 4 and report.num_bytes > 0 and report.total_s >= report.exposed_s >= 0
        assert not waiting.done()
        assert (await engine.stats()).suspended
        await engine.resume()
        assert (await waiting).versions.tolist() == [4, 4, 4]
        assert not (await engine.stats()).suspended

    play(scenario)


def test_running_requests_survive_a_load(play: Callable[[Scenario], None]) -> None:
    """S22 and S2: every request keeps its tokens and goes on; versions form one span each, in order."""

    async def scenario(engine: HostedEngine) -> None:
        asked = [ask(f"t{i}", 10 + i, seed=i, max_new_tokens=400) for i in range(2 * NUM_SLOTS)]
        running = [asyncio.ensure_future(engine.generate(request)) for request in asked]
        await until(lambda stats: stats.generated_tokens >= 20 * NUM_SLOTS, engine)
        await engine.suspend()
        sampled = (await engine.stats()).generated_tokens
        report = await engine.load(5)
        assert report.recomputed_tokens > 0
        assert (await engine.stats()).generated_tokens == sampled
        await engine.resume()
        answers = await asyncio.gather(*running)
        of_old = sum(int((answer.versions == 3).sum()) for answer in answers)
        assert of_old == sampled
        for answer in answers:
            assert len(answer.token_ids) == 400
            assert set(answer.versions.tolist()) <= {3, 5}
            assert (np.diff(answer.versions) >= 0).all()
        assert (await engine.stats()).recomputed_tokens > 0

    play(scenario)


def test_weights_are_prefetched_while_requests_run(play: Callable[[Scenario], None]) -> None:
    """They are sampled on under the old version; the load that follows exposes no more than it took in all."""

    async def scenario(engine: HostedEngine) -> None:
        running = asyncio.ensure_future(engine.generate(ask("a", max_new_tokens=480)))
        await until(lambda stats: stats.generated_tokens >= 5, engine)
        before = await engine.stats()
        await engine.prefetch(4)
        after = await engine.stats()
        assert (after.version, after.suspended) == (3, False)
        await until(lambda stats: stats.generated_tokens > before.generated_tokens, engine)
        await engine.suspend()
        report = await engine.load(4)
        assert 0 <= report.exposed_s <= report.total_s and report.total_s > 0
        await engine.resume()
        versions = (await running).versions.tolist()
        assert len(versions) == 480 and versions[0] == 3 and versions == sorted(versions)

    play(scenario)


def test_a_load_needs_a_suspended_engine_and_a_published_version(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: HostedEngine) -> None:
        with pytest.raises(EngineFailure, match="suspend it first"):
            await engine.load(4)
        await engine.suspend()
        with pytest.raises(EngineFailure, match=f"version {UNPUBLISHED_VERSION} cannot be fetched"):
            await engine.load(UNPUBLISHED_VERSION)
        await engine.resume()
        assert (await engine.generate(ask("a", max_new_tokens=1))).versions.tolist() == [3]
        with pytest.raises(EngineFailure, match="cannot be fetched"):
            await engine.prefetch(UNPUBLISHED_VERSION)

    play(scenario)


def test_an_abort_returns_what_was_sampled(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: HostedEngine) -> None:
        running = [asyncio.ensure_future(engine.generate(ask(f"t{i}", max_new_tokens=500))) for i in range(NUM_SLOTS)]
        waiting = asyncio.ensure_future(engine.generate(ask("late", max_new_tokens=500)))
        await until(lambda stats: stats.generated_tokens >= 5 * NUM_SLOTS and stats.num_waiting == 1, engine)
        await engine.abort("r-t0")
        await engine.abort("r-late")
        await engine.abort("r-unknown")
        answer = await running[0]
        assert answer.finish_reason == "abort" and 5 <= len(answer.token_ids) < 500
        assert len(answer.logprobs) == len(answer.versions) == len(answer.token_ids)
        assert (await waiting).finish_reason == "abort"
        # While suspended as well.
        await engine.suspend()
        await engine.abort("r-t1")
        assert (await running[1]).finish_reason == "abort"
        await engine.resume()
        assert all(answer.finish_reason != "abort" for answer in await asyncio.gather(*running[2:]))

    play(scenario)


def test_a_cancelled_caller_frees_the_slot(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: HostedEngine) -> None:
        task = asyncio.ensure_future(engine.generate(ask("a", max_new_tokens=500)))
        await until(lambda stats: stats.num_running == 1, engine)
        task.cancel()
        await until(lambda stats: stats.num_running == 0, engine)
        assert len((await engine.generate(ask("b", max_new_tokens=2))).token_ids) == 2

    play(scenario)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest("r", "t", np.empty(0, np.int32), SamplingParams(), 0), "one or more integers"),
        (GenerateRequest("r", "t", np.zeros((2, 2), np.int32), SamplingParams(), 0), "one or more integers"),
        (GenerateRequest("r", "t", np.array([VOCAB_SIZE]), SamplingParams(), 0), "leave the vocabulary"),
        (GenerateRequest("r", "t", np.array([-1]), SamplingParams(), 0), "leave the vocabulary"),
        (GenerateRequest("r", "t", np.array([3]), SamplingParams(top_p=0.5), 0), "top_p is 0.5"),
        (GenerateRequest("r", "t", np.array([3]), SamplingParams(top_k=3), 0), "top_k is 3"),
        (GenerateRequest("r", "t", np.array([3]), SamplingParams(temperature=-1.0), 0), "temperature is -1.0"),
    ],
)
def test_malformed_requests_fail_and_harm_nobody(
    play: Callable[[Scenario], None], request_: GenerateRequest, message: str
) -> None:
    """M11 among them: sampling whose log-probabilities would be wrong is refused."""

    async def scenario(engine: HostedEngine) -> None:
        with pytest.raises(EngineFailure, match=message):
            await engine.generate(request_)
        assert len((await engine.generate(ask("a", max_new_tokens=2))).token_ids) == 2

    play(scenario)


def test_a_dead_engine_fails_every_request_once(play: Callable[[Scenario], None], backend: Backend) -> None:
    """S25: whatever is running, waiting or arrives later is answered with the cause; nothing hangs."""

    async def scenario(engine: HostedEngine) -> None:
        asked = [asyncio.ensure_future(engine.generate(ask(f"t{i}", max_new_tokens=500))) for i in range(2 * NUM_SLOTS)]
        await until(lambda stats: stats.generated_tokens >= 1, engine)
        backend.kill(engine)
        results = await asyncio.gather(*asked, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineFailure)
            assert "out of cheese" in str(result)
        assert engine.failure is not None
        for late in (engine.generate(ask("late")), engine.suspend(), engine.resume(), engine.stats()):
            with pytest.raises(EngineFailure, match="out of cheese"):
                await late
        await engine.abort("r-t0")
        await engine.release("t0")

    play(scenario)


def test_closing_fails_what_still_runs(play: Callable[[Scenario], None]) -> None:
    async def scenario(engine: HostedEngine) -> None:
        running = asyncio.ensure_future(engine.generate(ask("a", max_new_tokens=500)))
        await until(lambda stats: stats.generated_tokens >= 1, engine)
        await engine.suspend()
        waiting = asyncio.ensure_future(engine.generate(ask("b")))
        await asyncio.sleep(0)
        await engine.close()
        for task in (running, waiting):
            with pytest.raises(EngineFailure, match="closed"):
                await task
        with pytest.raises(EngineFailure, match="closed"):
            await engine.generate(ask("c"))

    play(scenario)


def test_callers_of_several_event_loops_are_answered(backend: Backend, directory: Path) -> None:
    engine = backend.build(directory, 3)

    async def one(name: str) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return len((await engine.generate(ask(name, max_new_tokens=20))).token_ids)

    async def both() -> tuple[int, int]:
        other = asyncio.to_thread(asyncio.run, one("other-loop"))
        here, there = await asyncio.gather(one("this-loop"), other)
        return here, there

    assert asyncio.run(both()) == (20, 20)
    asyncio.run(engine.close())
