"""The simulated engine on a clock that the test moves: prefetch, loads, faults, and who is woken when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resources.clock import ManualClock, ScaledClock
from resources.engines.base import GenerateRequest, SamplingParams
from resources.engines.config import EngineConfig
from resources.engines.simulated import SimulatedEngine
from resources.engines.simulated_config import Fault, ScriptedAnswers, SimulatedConfig, SimulatedHardware
from resources.failures import DeadlineExceeded, EngineFailure

HARDWARE = SimulatedHardware(
    flops_per_s=4e9, bytes_per_s=1e9, memory_bytes=1e9, load_bytes_per_s=1e7, compute_efficiency=0.5,
    bandwidth_efficiency=1.0,
)  # fmt: skip
"""With the 5e7 parameters below: a step of one token takes 0.1 s, a prefill of 10 tokens 0.5 s, a transfer 10 s."""


class TokenizerlessVersions:
    """Versions 0 and above, with a configuration and nothing else."""

    def __init__(self, directory: Path) -> None:
        (directory / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 256}')
        self._directory = directory

    def policy_directory(self, version: int) -> Path:
        if version < 0:
            raise KeyError(f"version {version} is not published")
        return self._directory


def engine(directory: Path, clock: ManualClock, *, hardware=HARDWARE, faults: tuple[Fault, ...] = (), **settings: Any):
    simulated = SimulatedConfig(
        num_parameters=5e7,
        kv_bytes_per_token=0,
        hardware={"compute": hardware},
        answers=ScriptedAnswers(mean_tokens=20),
        faults=faults,
    )
    config = EngineConfig(backend="simulated", num_slots=2, simulated=simulated, **settings)
    return SimulatedEngine("compute-0", "compute", TokenizerlessVersions(directory), 3, config, clock=clock)


def ask(name: str, new_tokens: int = 10) -> GenerateRequest:
    token_ids = np.arange(10, dtype=np.int32) + ord(name[0]) - ord("a")
    return GenerateRequest(f"r-{name}", name, token_ids, SamplingParams(max_new_tokens=new_tokens), seed=1)


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def pass_time(clock: ManualClock, seconds: float) -> None:
    await settle()
    clock.advance(seconds)
    await settle()


async def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Versions are verified in a thread: wait until the work has come to wait for the clock."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.05)
    return task


def test_an_answer_arrives_when_its_last_step_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        one = engine(tmp_path, clock)
        answer = asyncio.ensure_future(one.generate(ask("a")))
        await pass_time(clock, 0.5 + 9 * 0.1 - 0.001)
        assert not answer.done()
        await pass_time(clock, 0.002)
        generation = answer.result()
        assert (generation.prefill_s, generation.decode_s) == (pytest.approx(0.5), pytest.approx(0.9))
        stats = await one.stats()
        assert stats.busy_s == pytest.approx(1.4) and stats.extra["num_steps"] == 10

    play(scenario)


def test_a_prefetch_hides_the_transfer_and_a_load_without_one_exposes_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        one = engine(tmp_path, clock)
        prefetch = await started(one.prefetch(4))
        answer = asyncio.ensure_future(one.generate(ask("a", 50)))
        await pass_time(clock, 9.9)
        assert answer.done() and not prefetch.done(), "the engine serves while the weights arrive"
        await pass_time(clock, 0.2)
        assert prefetch.done()
        await one.suspend()
        report = await one.load(4)
        assert (report.exposed_s, report.total_s, report.num_bytes) == (0.0, pytest.approx(10.0), 10**8)
        loading = await started(one.load(5))
        await pass_time(clock, 10.1)
        assert (await loading).exposed_s == pytest.approx(10.0, abs=0.2)
        await one.resume()
        half = await started(one.prefetch(6))
        await pass_time(clock, 6.0)
        await one.suspend()
        loading = await started(one.load(6))
        await pass_time(clock, 4.1)
        report = await loading
        await half
        assert report.exposed_s == pytest.approx(4.0, abs=0.2) and report.total_s == pytest.approx(10.0, abs=0.2)

    play(scenario)


def test_weights_that_have_arrived_are_swapped_in_at_their_own_speed(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        one = engine(tmp_path, clock, hardware=HARDWARE.model_copy(update={"swap_bytes_per_s": 1e8}))
        prefetch = await started(one.prefetch(4))
        await pass_time(clock, 10.1)
        await prefetch
        await one.suspend()
        loading = await started(one.load(4))
        assert not loading.done()
        await pass_time(clock, 1.01)
        assert loading.result().exposed_s == pytest.approx(1.0, abs=0.02)

    play(scenario)


def test_a_suspend_waits_for_the_step_that_runs_and_no_longer(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        one = engine(tmp_path, clock)
        answer = asyncio.ensure_future(one.generate(ask("a")))
        await pass_time(clock, 0.75)
        suspending = asyncio.ensure_future(one.suspend())
        await settle()
        assert not suspending.done()
        await pass_time(clock, 0.06)
        assert suspending.done() and (await one.stats()).generated_tokens == 4
        await pass_time(clock, 100.0)
        assert not answer.done()
        await one.resume()
        await pass_time(clock, 0.61)
        assert len(answer.result().token_ids) == 10

    play(scenario)


def test_a_crash_hands_back_what_was_sampled_and_refuses_the_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        one = engine(tmp_path, clock, faults=(Fault(kind="crash", after_s=1.0),))
        asked = [asyncio.ensure_future(one.generate(ask(name, 100))) for name in "abc"]
        await pass_time(clock, 1.2)
        first, second = asked[0].result(), asked[1].result()
        assert first.error is not None and "crashed (injected fault)" in first.error
        assert first.finish_reason == "abort" and len(first.token_ids) == len(first.versions) == 2
        assert len(second.token_ids) == 1
        with pytest.raises(EngineFailure, match="crashed"):
            asked[2].result()  # it waited for a slot
        for late in (one.generate(ask("d")), one.stats(), one.suspend()):
            with pytest.raises(EngineFailure, match="crashed"):
                await late

    play(scenario)


def test_a_hang_holds_up_answers_and_suspends_until_it_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        hang = Fault(kind="hang", after_s=0.7, duration_s=30.0)
        one = engine(tmp_path, clock, faults=(hang,), control_timeout_s=5.0)
        answer = asyncio.ensure_future(one.generate(ask("a")))
        await pass_time(clock, 20.0)
        suspending = asyncio.ensure_future(one.suspend())
        await pass_time(clock, 5.1)
        with pytest.raises(DeadlineExceeded, match="did not take up suspend within 5 s"):
            suspending.result()
        assert not answer.done()
        await one.resume()
        await pass_time(clock, 8.0)
        assert len(answer.result().token_ids) == 10

    play(scenario)


def test_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    small = HARDWARE.model_copy(update={"memory_bytes": 2e8 + 100})
    simulated = SimulatedConfig(num_parameters=5e7, kv_bytes_per_token=1, hardware={"compute": small})
    versions = TokenizerlessVersions(tmp_path)
    with pytest.raises(ValueError, match="leaves room for the KV of 100 tokens, and one history may have 256"):
        SimulatedEngine("e", "compute", versions, 0, EngineConfig(backend="simulated", simulated=simulated))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no max_position_embeddings; set it"):
        SimulatedEngine("e", "compute", versions, 0, EngineConfig(backend="simulated"))
    with pytest.raises(ValueError, match="the number of its tokens is unknown"):
        SimulatedEngine("e", "compute", versions, 0, EngineConfig(backend="simulated", context_length=64))


def test_clocks() -> None:
    with pytest.raises(ValueError, match="scale of a clock is 0; it must be above 0"):
        ScaledClock(0)
    clock = ManualClock()
    seen: list[tuple[str, float]] = []
    for when in (3.0, 1.0):
        clock.call_at(when, lambda when=when: seen.append((f"{when:g}", clock.now())))
    clock.call_at(2.0, lambda: seen.append(("cancelled", 0.0))).cancel()
    clock.advance(5.0)
    assert seen == [("1", 1.0), ("3", 3.0)] and clock.now() == 5.0

    async def scaled() -> None:
        fast, woken = ScaledClock(1000.0), asyncio.Event()
        start = fast.now()
        fast.call_at(start + 20.0, woken.set)
        await asyncio.gather(woken.wait(), fast.sleep(20.0))
        assert fast.now() >= start + 20.0

    asyncio.run(scaled())
