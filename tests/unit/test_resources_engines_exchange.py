"""The long poll between proxies and an engine, and the actor around it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from resources.engines.actor import EngineActor
from resources.engines.base import EngineStats, GenerateRequest, Generation, LoadReport, SamplingParams
from resources.engines.exchange import Exchange
from resources.failures import DeadlineExceeded, EngineFailure
from tests.contracts.engine_backends import build_local, kill_local
from tests.model_directories import write_model


class HandOperatedEngine:
    """Answers a request when the test says so; notes what it was told."""

    name = "engine-0"
    hardware_class = "compute"
    version = 7
    suspended = False

    def __init__(self, num_slots: int = 4) -> None:
        self.num_slots = num_slots
        self.failure: str | None = None
        self.running: dict[str, asyncio.Future[Generation]] = {}
        self.log: list[str] = []

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self.running)

    async def generate(self, request: GenerateRequest) -> Generation:
        self.log.append(f"generate {request.request_id}")
        if self.failure is not None:
            raise EngineFailure(self.failure)
        future = asyncio.get_running_loop().create_future()
        self.running[request.request_id] = future
        return await future

    def answer(self, request_id: str) -> None:
        empty = np.empty(0, np.int32)
        self.running.pop(request_id).set_result(
            Generation(request_id, request_id, empty, empty.astype(np.float32), empty, "stop")
        )

    async def abort(self, request_id: str) -> None:
        self.log.append(f"abort {request_id}")

    async def release(self, trajectory_id: str) -> None:
        self.log.append(f"release {trajectory_id}")

    async def prefetch(self, version: int) -> None:
        self.log.append(f"prefetch {version}")

    async def suspend(self) -> None: ...

    async def load(self, version: int) -> LoadReport:
        return LoadReport(version, 0.0, 0.0, 0)

    async def resume(self) -> None: ...

    async def stats(self) -> EngineStats:
        if self.failure is not None:
            raise EngineFailure(self.failure)
        return EngineStats("engine-0", "compute", 7, False, 0, 0, 4, 0, 0, 0, 0, 0.0, 0.0, 0.0)

    async def close(self) -> None: ...


def ask(name: str, max_new_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(name, name, np.array([3, 4], np.int32), SamplingParams(max_new_tokens=max_new_tokens), 0)


def test_a_poll_returns_all_that_finished_and_each_once() -> None:
    async def scenario() -> None:
        engine = HandOperatedEngine(num_slots=5)
        exchange = Exchange(engine)
        poll = asyncio.ensure_future(exchange.exchange("p", [ask("a"), ask("b"), ask("c")], [], [], wait_s=30.0))
        await asyncio.sleep(0)
        # A call that only submits returns at once, beside the waiting poll, and takes nothing from it.
        reply = await exchange.exchange("p", [ask("d")], [], [], wait_s=0.0)
        assert (reply.finished, reply.credits, reply.version, reply.suspended) == ([], 1, 7, False)
        await asyncio.sleep(0)
        engine.answer("a")
        engine.answer("c")
        assert [generation.request_id for generation in (await poll).finished] == ["a", "c"]
        engine.answer("b")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reply = await exchange.exchange("p", [], [], [], wait_s=30.0)
        assert [generation.request_id for generation in reply.finished] == ["b"]
        assert reply.credits == 4
        assert (await exchange.exchange("p", [], [], [], wait_s=0.001)).finished == []

    asyncio.run(scenario())


def test_proxies_get_their_own() -> None:
    async def scenario() -> None:
        engine = HandOperatedEngine()
        exchange = Exchange(engine)
        polls = [asyncio.ensure_future(exchange.exchange(p, [ask(p)], [], [], wait_s=30.0)) for p in ("p", "q")]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.answer("q")
        assert [generation.request_id for generation in (await polls[1]).finished] == ["q"]
        assert not polls[0].done()
        engine.answer("p")
        assert [generation.request_id for generation in (await polls[0]).finished] == ["p"]

    asyncio.run(scenario())


def test_requests_reach_the_engine_before_aborts_of_them() -> None:
    async def scenario() -> None:
        engine = HandOperatedEngine()
        await Exchange(engine).exchange("p", [ask("a")], ["a", "old"], ["t"], wait_s=0.0)
        assert engine.log == ["generate a", "abort a", "abort old", "release t"]
        engine.answer("a")
        await asyncio.sleep(0)

    asyncio.run(scenario())


def test_a_dead_engine_answers_with_errors_and_then_raises() -> None:
    async def scenario() -> None:
        engine = HandOperatedEngine()
        exchange = Exchange(engine)
        poll = asyncio.ensure_future(exchange.exchange("p", [ask("a")], [], [], wait_s=30.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.failure = "engine engine-0 died: RuntimeError: out of cheese"
        engine.running.pop("a").set_exception(EngineFailure(engine.failure))
        (generation,) = (await poll).finished
        assert (generation.request_id, generation.error) == ("a", engine.failure)
        assert len(generation.token_ids) == 0
        reply = await exchange.exchange("p", [ask("b")], [], [], wait_s=30.0)
        assert [generation.error for generation in reply.finished] == [engine.failure]
        with pytest.raises(EngineFailure, match="out of cheese"):
            await exchange.exchange("p", [], [], [], wait_s=30.0)

    asyncio.run(scenario())


def test_a_probe_finds_an_engine_that_answers_but_generates_nothing() -> None:
    """S25: found by a one-token generate, behind healthy stats."""

    async def scenario() -> None:
        engine = HandOperatedEngine()
        actor = EngineActor.around(engine)
        with pytest.raises(DeadlineExceeded, match=r"generated no token within 0\.01 s"):
            await actor.probe(timeout_s=0.01)
        engine.suspended = True
        assert await actor.probe(timeout_s=0.01) == 0.0
        engine.failure = "engine engine-0 died"
        with pytest.raises(EngineFailure, match="died"):
            await actor.probe(timeout_s=0.01)

    asyncio.run(scenario())


def test_turns_through_the_actor_of_a_local_engine(tmp_path: Path) -> None:
    directory = write_model(tmp_path)

    async def scenario() -> None:
        engine = build_local(directory, 0)
        actor = EngineActor.around(engine)
        assert await actor.probe() > 0
        asked = {f"t{i}" for i in range(20)}
        reply = await actor.exchange("p", [ask(name) for name in sorted(asked)], [], [], wait_s=10.0)
        finished = list(reply.finished)
        while len(finished) < 20:
            finished += (await actor.exchange("p", [], [], [], wait_s=10.0)).finished
        assert {generation.request_id for generation in finished} == asked
        await actor.prefetch(1)
        await actor.suspend()
        waiting = await actor.exchange("p", [ask("late")], [], [], wait_s=0.0)
        assert not waiting.finished
        assert (await actor.load(1)).version == 1
        await actor.resume()
        (late,) = (await actor.exchange("p", [], [], [], wait_s=10.0)).finished
        assert late.versions.tolist() == [1, 1, 1]
        kill_local(engine)
        (lost,) = (await actor.exchange("p", [ask("lost")], [], [], wait_s=10.0)).finished
        assert lost.error is not None and "out of cheese" in lost.error
        with pytest.raises(EngineFailure, match="out of cheese"):
            await actor.stats()
        await actor.close()

    asyncio.run(scenario())
