"""The simulated engine's batch: closed-form jumps give what step after step gives, and every token its version."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resources.engines.base import GenerateRequest, Generation, SamplingParams
from resources.engines.simulated_answers import AnswerScript
from resources.engines.simulated_batch import SimulatedBatch
from resources.engines.simulated_cache import PrefixKV
from resources.engines.simulated_config import Fault, ScriptedAnswers, SimulatedConfig, SimulatedHardware
from resources.engines.simulated_faults import FaultSchedule
from resources.engines.simulated_timing import StepTiming

TIMING = StepTiming(seconds_per_token=0.01, seconds_of_weights=0.1, seconds_per_kv_token=0.001, overhead_s=0.0)
STOP = 1


def batch(
    *, timing: StepTiming = TIMING, answers: ScriptedAnswers | None = None, faults: tuple[Fault, ...] = (), **sizes
) -> SimulatedBatch:
    settings_ = {"num_slots": 4, "context_length": 512, "kv_capacity_tokens": 4096, "max_prefill_tokens": 64, **sizes}
    return SimulatedBatch(
        engine="e",
        hardware_class="c",
        version=3,
        timing=timing,
        script=AnswerScript(answers or ScriptedAnswers(), 100),
        cache=PrefixKV("shared"),
        faults=FaultSchedule(faults, "e", "c", 0.0),
        **settings_,
    )


def ask(name: str, length: int = 10, *, seed: int = 0, new_tokens: int = 8, stops: tuple[int, ...] = ()):
    token_ids = (np.arange(length) * 7 + len(name) + seed).astype(np.int32) % 20
    sampling = SamplingParams(max_new_tokens=new_tokens, stop_token_ids=stops)
    return GenerateRequest(f"r-{name}", name, token_ids, sampling, seed)


def run(one: SimulatedBatch, until: float = 1e9) -> dict[str, tuple[float, Generation]]:
    one.advance(until)
    return {generation.request_id: (at, generation) for at, _, generation in one.take_finished(until)}


@given(
    st.integers(1, 40), st.integers(1, 50), st.integers(0, 5000), st.floats(0.0, 0.05), st.floats(0.0, 1.0),
    st.floats(0.0, 0.01),
)  # fmt: skip
def test_the_closed_form_is_the_sum_of_steps(num_steps, batch_size, kv, per_token, weights, per_kv) -> None:
    timing = StepTiming(per_token, weights, per_kv, overhead_s=0.003)
    total = sum(timing.step(batch_size, kv + i * batch_size) for i in range(num_steps))
    assert timing.decode_steps(num_steps, batch_size, kv) == pytest.approx(total)
    for part in range(1, num_steps + 1):
        just_before = timing.decode_steps(part, batch_size, kv) * (1 - 1e-9)
        assert timing.decode_steps_beyond(just_before, num_steps, batch_size, kv) <= part
    assert timing.decode_steps_beyond(1e9, num_steps, batch_size, kv) == num_steps


def test_figures_of_a_class_give_the_roofline() -> None:
    hardware = SimulatedHardware(
        flops_per_s=100e12, bytes_per_s=2e12, memory_bytes=80e9, compute_efficiency=0.5, bandwidth_efficiency=0.5
    )
    config = SimulatedConfig(num_parameters=1e9, kv_bytes_per_token=1e5, hardware={"compute": hardware})
    timing = StepTiming.of(config, "compute")
    assert timing.step(1, 0) == pytest.approx(2e9 / 1e12), "one token is bound by the read of the weights"
    assert timing.step(1000, 0) == pytest.approx(1000 * 2e9 / 50e12), "a long prefill by arithmetic"
    assert timing.step(8, 10000) == pytest.approx((2e9 + 1e9) / 1e12), "KV counts as traffic"
    assert config.kv_capacity_tokens("compute") == int((80e9 - 4e9) / 1e5)


def test_a_request_takes_its_prefill_and_its_steps() -> None:
    one = batch()
    one.submit(ask("a", 100, new_tokens=3), 0.0)
    at, generation = run(one)["r-a"]
    prefill = TIMING.step(64, 64) + TIMING.step(36, 100)
    decode = TIMING.step(1, 101) + TIMING.step(1, 102)
    assert at == pytest.approx(prefill + decode)
    assert (generation.prefill_s, generation.decode_s) == (pytest.approx(prefill), pytest.approx(decode))
    assert generation.queue_s == 0.0 and generation.finish_reason == "length"
    counters = one.counters
    assert (counters.prefilled_tokens, counters.generated_tokens, counters.num_steps) == (100, 3, 4)
    assert counters.busy_s == pytest.approx(counters.prefill_s + counters.decode_s) == pytest.approx(at)


def test_an_arrival_waits_for_the_step_that_runs() -> None:
    one = batch(timing=dataclasses.replace(TIMING, seconds_per_kv_token=0.0))
    one.submit(ask("a", new_tokens=50), 0.0)
    one.advance(1.05)  # steps of 0.1 s: the eleventh runs until 1.1
    one.submit(ask("b", seed=1, new_tokens=1), 1.05)
    answers = run(one)
    at, generation = answers["r-b"]
    assert generation.queue_s == pytest.approx(0.05)
    assert at == pytest.approx(1.1 + max(0.1, 11 * 0.01))


def test_when_the_clock_is_looked_at_does_not_matter() -> None:
    """Arrivals at the same times: one look at the end, or a look every few milliseconds, give the same ends."""

    def play(looks: list[float]) -> dict[str, tuple[float, list[int]]]:
        one = batch(answers=ScriptedAnswers(length="uniform", mean_tokens=20), kv_capacity_tokens=200)
        arrivals = [(0.37 * i, ask(f"t{i}", 20 + i, seed=i, new_tokens=60, stops=(STOP,))) for i in range(12)]
        ends: dict[str, tuple[float, list[int]]] = {}
        for at, request in sorted(
            [*arrivals, *((look, None) for look in looks)], key=lambda event: (event[0], event[1] is None)
        ):
            one.advance(at)
            if request is not None:
                one.submit(request, at)
            ends |= {g.request_id: (round(t, 6), g.token_ids.tolist()) for t, _, g in one.take_finished(at)}
        return ends

    once = play([200.0])
    often = play([0.013 * i for i in range(2000)] + [200.0])
    assert len(once) == 12 and often == once


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_every_request_ends_once_whatever_happens(seed: int) -> None:
    """Aborts, suspensions, loads, releases at random: each request is answered once, versions never fall, counters
    add up, and nothing is left."""
    draw = random.Random(seed)
    one = batch(answers=ScriptedAnswers(length="geometric", mean_tokens=12), kv_capacity_tokens=600, num_slots=3)
    now, asked, ended = 0.0, {}, {}
    for number in range(60):
        now += draw.random()
        one.advance(now)
        match draw.choice(["submit", "submit", "submit", "abort", "load", "release", "look"]):
            case "submit":
                name = f"t{draw.randrange(8)}-{number}"
                request = ask(name, draw.randrange(1, 90), seed=number, new_tokens=draw.randrange(0, 40), stops=(STOP,))
                asked[request.request_id] = request
                one.submit(request, now)
            case "abort" if asked:
                one.abort(draw.choice(list(asked)), now)
            case "load":
                one.suspended = True
                generated = one.counters.generated_tokens
                now += 5.0
                one.advance(now)
                assert one.counters.generated_tokens == generated
                one.switch(one.version + 1)
                one.resume(now)
            case "release":
                one.release(f"t{draw.randrange(8)}")
        for _, _, generation in one.take_finished(now):
            assert generation.request_id not in ended
            ended[generation.request_id] = generation
    for _, _, generation in (one.advance(now + 1e6), one.take_finished(now + 1e6))[1]:
        assert generation.request_id not in ended
        ended[generation.request_id] = generation
    assert ended.keys() == asked.keys()
    assert one.num_running == one.num_waiting == 0 and one.next_event() is None
    assert len(one._decoding) == 0 and one._decoding.kv_tokens == 0 and one._reserved == 0
    assert one.counters.generated_tokens == sum(len(generation.token_ids) for generation in ended.values())
    for generation in ended.values():
        assert len(generation.token_ids) == len(generation.versions) == len(generation.logprobs)
        assert (np.diff(generation.versions) >= 0).all() and set(generation.versions) <= set(range(3, one.version + 1))


def test_spans_of_versions_when_the_version_moves_while_sampling() -> None:
    """S2: after 57 of 128 sampled tokens the version moves: (v3: 57), (v4: 71); the KV is computed again."""
    one = batch(timing=dataclasses.replace(TIMING, seconds_per_kv_token=0.0))
    one.submit(ask("a", 30, new_tokens=128), 0.0)
    one.advance(TIMING.step(30, 0) + 56 * 0.1 - 0.05)
    one.suspended = True
    assert one.counters.generated_tokens == 57
    assert one.switch(4) == 30 + 57 - 1
    one.resume(100.0)
    at, generation = run(one)["r-a"]
    assert generation.versions.tolist() == [3] * 57 + [4] * 71
    assert one.counters.recomputed_tokens == 30 + 57 - 1
    # The history of 87 tokens is computed again in two pieces; the second one samples token 58.
    assert at == pytest.approx(100.0 + 64 * 0.01 + 23 * 0.01 + 70 * 0.1)


def test_a_turn_computes_its_new_tokens_only_and_all_of_them_after_a_load() -> None:
    one = batch()
    first = ask("t", 50, new_tokens=6)
    one.submit(first, 0.0)
    _, generation = run(one, 100.0)["r-t"]
    history = np.concatenate([first.token_ids, generation.token_ids, np.full(20, 3, np.int32)])
    one.submit(dataclasses.replace(first, request_id="second", token_ids=history), 100.0)
    _, second = run(one, 200.0)["second"]
    assert second.cached_tokens == 55 and one.counters.prefilled_tokens == 50 + 21
    one.suspended = True
    assert one.switch(4) == 76 + 6 - 1
    one.resume(200.0)
    longer = np.concatenate([history, second.token_ids, np.full(5, 4, np.int32)])
    one.submit(dataclasses.replace(first, request_id="third", token_ids=longer), 200.0)
    _, third = run(one, 300.0)["third"]
    assert third.cached_tokens == 0 and one.counters.recomputed_tokens == 81
    other = dataclasses.replace(first, request_id="fourth", token_ids=longer[::-1].copy())
    one.submit(other, 300.0)
    assert run(one, 400.0)["fourth"][1].cached_tokens == 0, "another history of the same name shares nothing"


def test_siblings_share_their_opening_and_differ_by_seed() -> None:
    one = batch(num_slots=8)
    opening = ask("m", 60).token_ids
    for member in range(8):
        one.submit(dataclasses.replace(ask(f"m{member}", seed=member), token_ids=opening), 0.0)
    answers = [generation for _, generation in run(one).values()]
    assert sorted(answer.cached_tokens for answer in answers) == [0] + [59] * 7
    assert len({tuple(answer.token_ids.tolist()) for answer in answers}) == 8


def test_memory_admits_what_fits_and_drops_what_was_not_used_for_longest() -> None:
    one = batch(kv_capacity_tokens=100, num_slots=8)
    one.submit(ask("a", 50, new_tokens=10), 0.0)
    one.submit(ask("b", 50, seed=1, new_tokens=10), 0.0)
    one.advance(0.0)
    assert (one.num_running, one.num_waiting) == (1, 1), "60 tokens each: the second waits for memory, not for a slot"
    assert len(run(one, 100.0)) == 2
    assert one._cache.num_tokens == 59, "b needed the room that a's history took"


def test_what_is_sampled_goes_on_after_the_loss_of_an_engine() -> None:
    """The rest of a request on another engine: the same tokens, and as many, in every distribution."""
    for length in ("fixed", "uniform", "geometric", "lognormal"):
        answers = ScriptedAnswers(length=length, mean_tokens=30)
        whole_request = ask("t", 25, seed=11, new_tokens=200, stops=(STOP, 7))
        first = batch(answers=answers)
        first.submit(whole_request, 0.0)
        _, whole = run(first)["r-t"]
        assert whole.finish_reason == "stop" and whole.token_ids[-1] == STOP
        assert not np.isin(whole.token_ids[:-1], (STOP, 7)).any()
        for kept in {1, len(whole.token_ids) // 2, len(whole.token_ids) - 1} - {0}:
            history = np.concatenate([whole_request.token_ids, whole.token_ids[:kept]])
            rest_request = dataclasses.replace(whole_request, request_id="rest", token_ids=history)
            second = batch(answers=answers)
            second.submit(rest_request, 0.0)
            _, rest = run(second)["rest"]
            assert [*whole.token_ids[:kept], *rest.token_ids] == whole.token_ids.tolist(), (length, kept)


def test_answers_have_the_mean_that_is_asked_for() -> None:
    for length in ("uniform", "geometric", "lognormal"):
        script = AnswerScript(ScriptedAnswers(length=length, mean_tokens=50, sigma=0.8), 1000)
        plans = [script.plan(ask("t", seed=seed, new_tokens=10**6, stops=(STOP,)), 10**7) for seed in range(1500)]
        assert np.mean([plan.num_tokens for plan in plans]) == pytest.approx(50, rel=0.1), length
    with pytest.raises(ValueError, match=r"token_ids is \[5, 200\], but the policy has 100 tokens"):
        AnswerScript(ScriptedAnswers(token_ids=(5, 200)), 100)


def test_a_slow_engine_takes_longer_only_while_it_is_slow() -> None:
    timing = dataclasses.replace(TIMING, seconds_per_kv_token=0.0)
    slow = Fault(kind="slow", after_s=2.05, duration_s=3.9, factor=4.0)
    one = batch(timing=timing, faults=(slow,))
    one.submit(ask("a", 10, new_tokens=100), 0.0)
    at, _ = run(one)["r-a"]
    # Steps that begin within the slow seconds take 0.4 s: ten of them, three quarters of each in addition.
    assert at == pytest.approx(100 * 0.1 + 10 * 0.3)


def test_a_hang_ends_when_it_is_said_to() -> None:
    timing = dataclasses.replace(TIMING, seconds_per_kv_token=0.0)
    one = batch(timing=timing, faults=(Fault(kind="hang", after_requests=2, duration_s=50.0),))
    one.submit(ask("a", 10, new_tokens=20), 0.0)
    one.advance(0.95)
    one.submit(ask("b", 10, seed=1, new_tokens=1), 0.95)
    assert run(one, 50.0) == {}
    assert one.next_event() == pytest.approx(50.95)
    assert len(run(one, 60.0)) == 2
    forever = batch(faults=(Fault(kind="hang", after_s=0.0),))
    forever.submit(ask("a"), 1.0)
    assert run(forever) == {} and forever.next_event() is None


def test_triggers_by_number_and_by_chance() -> None:
    faults = (Fault(kind="crash", after_requests=3), Fault(kind="wrong_version", probability=0.2, duration_s=0.5))
    schedule = FaultSchedule(faults, "e", "c", 0.0)
    wrong = 0
    for number in range(400):
        schedule.request_arrived(float(number))
        assert schedule.crashed_at(float(number)) == (None if number < 2 else 2.0)
        wrong += schedule.claims_wrong_version(float(number))
    assert 50 <= wrong <= 110
    for other in (Fault(kind="crash", engine="f", after_s=0), Fault(kind="crash", hardware_class="d", after_s=0)):
        assert FaultSchedule((other,), "e", "c", 0.0).crashed_at(1.0) is None
