"""The LLM proxy over scripted engines: routing, batching, loss, suspension, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from resources.engines.base import GenerateRequest, Generation, SamplingParams
from resources.failures import EngineFailure, InfrastructureFailure
from resources.rollout.config import RolloutConfig
from resources.rollout.proxy import LLMProxy


@dataclass
class Reply:
    finished: list[Generation]
    credits: int = 8
    version: int = 0
    suspended: bool = False


class ScriptedEngine:
    """Samples token ids 100, 101, ... ; ``cut_after`` tokens it fails with what it has."""

    def __init__(self, name: str, *, version: int = 0, capacity: int = 8, cut_after: int | None = None):
        self.name, self.version, self.capacity, self.cut_after = name, version, capacity, cut_after
        self.suspended = self.lost = self.hanging = False
        self.exchanges: list[tuple[list[GenerateRequest], list[str], list[str], float]] = []
        self.running: list[GenerateRequest] = []
        self.finished: list[Generation] = []
        self.arrival = asyncio.Event()

    async def exchange(self, proxy_id, requests, aborts, releases, wait_s):
        self.exchanges.append((requests, aborts, releases, wait_s))
        if self.lost:
            raise InfrastructureFailure(f"{self.name}: its worker is gone")
        if self.hanging:
            await asyncio.sleep(3600)
        self.running += requests
        self.running = [request for request in self.running if request.request_id not in aborts]
        if not self.suspended:
            self.work()
        if wait_s > 0 and not self.finished:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.arrival.wait(), wait_s)
        self.arrival.clear()
        finished = []
        if wait_s > 0:
            finished, self.finished = self.finished, []
        return Reply(finished, self.capacity - len(self.running), self.version, self.suspended)

    def work(self):
        for request in self.running:
            number = request.sampling.max_new_tokens
            cut = self.cut_after is not None and self.cut_after < number
            number = self.cut_after if cut else number
            self.finished.append(
                Generation(
                    request.request_id,
                    request.trajectory_id,
                    np.arange(100, 100 + number, dtype=np.int32) + len(request.token_ids),
                    np.full(number, -0.5, np.float32),
                    np.full(number, self.version, np.int32),
                    "abort" if cut else "length",
                    self.name,
                    "c",
                    error="slot lost" if cut else None,
                )  # fmt: skip
            )
        if self.running:
            self.running = []
            self.arrival.set()

    def resume(self):
        self.suspended = False
        self.work()

    @property
    def requests(self) -> list[GenerateRequest]:
        return [request for requests, *_ in self.exchanges for request in requests]


def request(number: int = 0, *, trajectory: str | None = None, new_tokens: int = 4, **changes: Any) -> GenerateRequest:
    return GenerateRequest(
        f"r{number}",
        trajectory or f"t{number}",
        np.arange(3, dtype=np.int32),
        SamplingParams(max_new_tokens=new_tokens),
        7,
        **changes,
    )


async def call(actor, method, *arguments):
    return await getattr(actor, method)(*arguments)


class Bench:
    """A proxy over scripted engines."""

    def __init__(self, engines, fallback=None, stale_engines=(), **config):
        self.lines: list[str] = []
        self.now = 0.0
        config = {"engine_poll_s": 0.05, "exchange_deadline_s": 5.0, "engine_wait_s": 5.0, **config}
        self.proxy = LLMProxy(
            "p", engines, RolloutConfig(**config), call=call, fallback=fallback,
            stale_engines=stale_engines, log=self.lines.append,
            clock=lambda: self.now or asyncio.get_running_loop().time(),
        )  # fmt: skip


def play(main):
    async def bounded():
        return await asyncio.wait_for(main(), 10)

    return asyncio.run(bounded())


def test_a_request_is_answered_under_its_own_id():
    async def main():
        engine = ScriptedEngine("e")
        bench = Bench({"c": [("e", engine)]})
        generation = await bench.proxy.generate(request(), "c")
        assert (generation.request_id, generation.engine) == ("r0", "e")
        assert generation.token_ids.tolist() == [103, 104, 105, 106]
        await bench.proxy.close()

    play(main)


def test_requests_of_one_tick_travel_together():
    async def main():
        engine = ScriptedEngine("e", capacity=100)
        bench = Bench({"c": [("e", engine)]})
        await asyncio.gather(*(bench.proxy.generate(request(i), "c") for i in range(50)))
        assert [len(requests) for requests, *_ in engine.exchanges if requests] == [50]
        await bench.proxy.close()

    play(main)


def test_a_request_beside_a_waiting_poll_is_sent_at_once():
    async def main():
        engine = ScriptedEngine("e")
        engine.suspended = True
        bench = Bench({"c": [("e", engine)]}, engine_poll_s=4.0)
        first = asyncio.create_task(bench.proxy.generate(request(0), "c"))
        for _ in range(5):
            await asyncio.sleep(0)
        second = asyncio.create_task(bench.proxy.generate(request(1), "c"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert [(len(requests), wait_s) for requests, _, _, wait_s in engine.exchanges] == [(1, 4.0), (1, 0.0)]
        engine.resume()
        await asyncio.gather(first, second)
        await bench.proxy.close()

    play(main)


def test_requests_during_a_suspension_wait_and_are_not_lost():
    """S27, S22: nothing fails, nothing is sampled anew, and the suspension does not count towards the deadline."""

    async def main():
        engine = ScriptedEngine("e")
        engine.suspended = True
        bench = Bench({"c": [("e", engine)]}, generate_deadline_s=5.0, suspend_limit_s=100.0)
        waiting = [asyncio.create_task(bench.proxy.generate(request(i), "c")) for i in range(16)]
        await asyncio.sleep(0.12)  # a poll returns empty-handed and says that the engine is suspended
        bench.proxy.age_requests(50.0)
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        engine.version = 1
        engine.resume()
        generations = await asyncio.gather(*waiting)
        assert [g.request_id for g in generations] == [f"r{i}" for i in range(16)]
        assert len(engine.requests) == 16
        await bench.proxy.close()

    play(main)


def test_turns_stay_on_the_engine_that_holds_the_prefix_and_new_ones_go_where_there_is_room():
    async def main():
        small, large = ScriptedEngine("small", capacity=2), ScriptedEngine("large", capacity=9)
        bench = Bench({"c": [("small", small), ("large", large)]})
        await asyncio.gather(*(bench.proxy.generate(request(i), "c") for i in range(2)))  # learns the credits
        homes = {r.trajectory_id: engine for engine in (small, large) for r in engine.requests}
        assert homes["t0"] is not homes["t1"]
        for turn in range(3):
            await bench.proxy.generate(request(10 + turn, trajectory="t0"), "c")
        assert [r.trajectory_id for r in homes["t0"].requests].count("t0") == 4
        before = len(large.requests)
        await asyncio.gather(*(bench.proxy.generate(request(20 + i), "c") for i in range(6)))
        assert len(large.requests) - before == 6, "six of nine free places, while the other has two"
        await bench.proxy.close()

    play(main)


def test_members_of_a_group_may_land_on_different_engines():
    """A group is no unit of placement: its members fill what is free, wherever that is."""

    async def main():
        engines = [ScriptedEngine(name, capacity=4) for name in ("e0", "e1")]
        bench = Bench({"c": [(engine.name, engine) for engine in engines]})
        await asyncio.gather(*(bench.proxy.generate(request(90 + i), "c") for i in range(2)))  # learns the credits
        members = [request(member, trajectory=f"run/lake-000000/{member}/0") for member in range(8)]
        generations = await asyncio.gather(*(bench.proxy.generate(member, "c") for member in members))
        assert sorted(generation.engine for generation in generations) == ["e0"] * 4 + ["e1"] * 4
        await bench.proxy.close()

    play(main)


def test_an_error_goes_to_another_engine_with_the_tokens_already_sampled():
    """Token-level re-routing: 3 tokens of version 4 on one engine, 5 of version 5 on the other; none is sampled
    twice."""

    async def main():
        broken, good = ScriptedEngine("broken", version=4, cut_after=3), ScriptedEngine("good", version=5)
        bench = Bench({"c": [("broken", broken)], "d": [("good", good)]}, fallback={"c": ["d"]})
        generation = await bench.proxy.generate(request(new_tokens=8), "c")
        assert generation.versions.tolist() == [4] * 3 + [5] * 5
        assert generation.token_ids.tolist() == [103, 104, 105, 106, 107, 108, 109, 110]
        assert len(generation.logprobs) == 8 and generation.finish_reason == "length"
        (continued,) = good.requests
        assert continued.token_ids.tolist() == [0, 1, 2, 103, 104, 105]
        assert continued.sampling.max_new_tokens == 5 and continued.seed == 7
        assert bench.proxy.stats()["num_rescued_tokens"] == 3
        await bench.proxy.close()

    play(main)


def test_a_lost_engine_is_left_alone_and_its_fallback_counted_once_in_the_log():
    async def main():
        lost, other = ScriptedEngine("lost"), ScriptedEngine("other", capacity=100)
        lost.lost = True
        bench = Bench({"c": [("lost", lost)], "d": [("other", other)]}, fallback={"c": ["d"]}, engine_cooldown_s=1000.0)
        await asyncio.gather(*(bench.proxy.generate(request(i), "c") for i in range(20)))
        await bench.proxy.generate(request(99), "c")
        stats = bench.proxy.stats()
        assert stats["num_fallbacks"] == {"c->d": 21}
        assert bench.lines == ["no usable engine of class 'c': its requests go to the fallback class 'd'"]
        assert not stats["engines"]["lost"]["usable"] and "worker is gone" in stats["engines"]["lost"]["last_error"]
        assert len(lost.exchanges) == 1
        await bench.proxy.close()

    play(main)


def test_attempts_are_bounded():
    async def main():
        engines = [ScriptedEngine(f"e{i}", cut_after=0) for i in range(5)]
        bench = Bench({"c": [(e.name, e) for e in engines]}, max_engine_attempts=3)
        with pytest.raises(EngineFailure, match="3 engines failed on a request of t0: .*slot lost"):
            await bench.proxy.generate(request(), "c")
        assert sum(len(e.requests) for e in engines) == 3
        await bench.proxy.close()

    play(main)


def test_without_a_usable_engine_the_wait_is_bounded():
    """S20: an error within a bounded time that names the class and what is wrong with its engines."""

    async def main():
        lost = ScriptedEngine("lost")
        lost.lost = True
        bench = Bench({"c": [("lost", lost)]}, engine_wait_s=0.05, engine_cooldown_s=1000.0)
        with pytest.raises(EngineFailure, match="no engine of class 'c' or its fallbacks .* lost .*worker is gone"):
            await bench.proxy.generate(request(), "c")
        await bench.proxy.close()

    play(main)


def test_a_failed_engine_is_tried_again_after_its_pause():
    async def main():
        engine = ScriptedEngine("e")
        engine.lost = True
        bench = Bench({"c": [("e", engine)]}, engine_cooldown_s=0.05, engine_wait_s=5.0)
        waiting = asyncio.create_task(bench.proxy.generate(request(), "c"))
        await asyncio.sleep(0.01)
        engine.lost = False
        assert (await waiting).engine == "e"
        await bench.proxy.close()

    play(main)


def test_an_engine_that_answers_no_call_is_given_up():
    """S25: behind a live process a hung engine; the exchange's own deadline finds it."""

    async def main():
        hung, good = ScriptedEngine("hung"), ScriptedEngine("good")
        hung.hanging = True
        bench = Bench({"c": [("hung", hung)], "d": [("good", good)]}, fallback={"c": ["d"]}, exchange_deadline_s=0.05)
        assert (await bench.proxy.generate(request(), "c")).engine == "good"
        assert "no answer to an exchange" in bench.proxy.stats()["engines"]["hung"]["last_error"]
        await bench.proxy.close()

    play(main)


def test_a_generation_beyond_its_deadline_is_aborted_and_goes_elsewhere():
    async def main():
        slow, good = ScriptedEngine("slow"), ScriptedEngine("good")
        slow.work = lambda: None  # answers polls, finishes nothing
        bench = Bench({"c": [("slow", slow)], "d": [("good", good)]}, fallback={"c": ["d"]}, generate_deadline_s=30.0)
        waiting = asyncio.create_task(bench.proxy.generate(request(), "c"))
        await asyncio.sleep(0.01)
        bench.proxy.age_requests(29.0)
        await asyncio.sleep(0)
        assert not waiting.done()
        bench.proxy.age_requests(2.0)
        assert (await waiting).engine == "good"
        await asyncio.sleep(0.06)
        assert [aborts for _, aborts, _, _ in slow.exchanges if aborts] == [["r0#0"]]
        await bench.proxy.close()

    play(main)


def test_cancelling_aborts_on_the_engine_and_releasing_frees_the_prefix():
    async def main():
        engine = ScriptedEngine("e")
        engine.suspended = True
        bench = Bench({"c": [("e", engine)]}, engine_poll_s=4.0)
        waiting = asyncio.create_task(bench.proxy.generate(request(), "c"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        bench.proxy.release("t0")
        await asyncio.sleep(0.05)
        assert [aborts for _, aborts, _, _ in engine.exchanges if aborts] == [["r0#0"]]
        assert [releases for _, _, releases, _ in engine.exchanges if releases] == [["t0"]]
        assert not engine.running
        await bench.proxy.close()

    play(main)


def test_engines_may_be_replaced_while_requests_run():
    async def main():
        old, new = ScriptedEngine("e"), ScriptedEngine("e", version=3)
        old.suspended = True
        bench = Bench({"c": [("e", old)]})
        waiting = asyncio.create_task(bench.proxy.generate(request(), "c"))
        await asyncio.sleep(0.01)
        bench.proxy.set_engines({"c": [("e", new)]})
        assert (await waiting).versions.tolist() == [3, 3, 3, 3]
        await bench.proxy.close()

    play(main)
