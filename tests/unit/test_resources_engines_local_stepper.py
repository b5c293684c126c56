"""Steps of the local engine, one by one: what is sampled equals a full recompute, across turns, loads and evictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from resources.engines.base import GenerateRequest, Generation, SamplingParams
from resources.engines.local_forward import LocalForward
from resources.engines.local_layout import read_layout
from resources.engines.local_slots import SlotTable
from resources.engines.local_stepper import Stepper, Ticket
from resources.engines.local_weights import fuse_weights
from tests.model_directories import VOCAB_SIZE, PublishedVersions, full_recompute, write_model


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> PublishedVersions:
    return PublishedVersions(write_model(tmp_path_factory.mktemp("model")))


def stepper(versions: PublishedVersions, version: int = 0, *, num_slots: int = 4, budget: int = 1024, **table: Any):
    layout = read_layout(versions.path)
    settings = {"context_length": 512, "prefix_cache": "shared", **table}
    return Stepper(
        forward=LocalForward(layout, num_slots, settings["context_length"]),
        weights=fuse_weights(layout, versions.fetch(version), version),
        table=SlotTable(num_slots, **settings),
        max_prefill_tokens=budget,
        engine="engine-0",
        hardware_class="compute",
    )


def switch(engine: Stepper, versions: PublishedVersions, version: int) -> int:
    return engine.switch(fuse_weights(engine.forward.layout, versions.fetch(version), version))


def ticket(name: str, token_ids: Any, seed: int = 0, **sampling: Any) -> Ticket:
    request = GenerateRequest(name, name, np.asarray(token_ids, dtype=np.int32), SamplingParams(**sampling), seed)
    return Ticket(request, answer=lambda _: None, submitted_at=0.0)


def run(engine: Stepper, tickets: list[Ticket], steps: int | None = None) -> dict[str, Generation]:
    """Admit when there is room, step until all are done (or so many steps)."""
    waiting, finished = list(tickets), {}
    while (waiting or engine.tickets) and steps != 0:
        waiting = [one for one in waiting if not engine.admit(one)]
        with torch.inference_mode():
            for _, generation in engine.step():
                finished[generation.request_id] = generation
        steps = None if steps is None else steps - 1
    assert not waiting
    return finished


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).astype(np.int32)


def check_logprobs(
    versions: PublishedVersions, history: np.ndarray, generation: Generation, temperature: float = 1.0
) -> None:
    """Behaviour log-probabilities equal transformers' over the whole history, token by token under its own version."""
    tokens = [*history.tolist(), *generation.token_ids.tolist()]
    for version in np.unique(generation.versions).tolist():
        logprobs = full_recompute(versions.path, versions.fetch(version), tokens)
        logprobs = torch.log_softmax(logprobs / temperature, -1)
        for index in np.flatnonzero(generation.versions == version).tolist():
            position = len(history) + index
            expected = float(logprobs[position - 1, tokens[position]])
            assert generation.logprobs[index] == pytest.approx(expected, abs=1e-4), (version, index)


def test_turns_of_many_trajectories_equal_a_full_recompute(versions: PublishedVersions) -> None:
    """More trajectories than slots, ragged prompts in small pieces, evictions: every log-probability is right."""
    engine = stepper(versions, num_slots=3, budget=16)
    histories = {f"t{i}": prompt(5 + 17 * i, seed=i) for i in range(5)}
    for turn in range(3):
        asked = [
            ticket(name, h, i, max_new_tokens=4 + i, temperature=0.7) for i, (name, h) in enumerate(histories.items())
        ]
        finished = run(engine, asked)
        assert len(finished) == 5
        for i, (name, history) in enumerate(histories.items()):
            generation = finished[name]
            assert generation.finish_reason == "length" and len(generation.token_ids) == 4 + i
            if turn == 2 or name == "t4":
                check_logprobs(versions, history, generation, temperature=0.7)
            histories[name] = np.concatenate([history, generation.token_ids, prompt(9, seed=100 + turn)])
    assert engine.counters.generated_tokens == 3 * (4 + 5 + 6 + 7 + 8)


def test_a_turn_computes_its_new_tokens_only(versions: PublishedVersions) -> None:
    engine = stepper(versions)
    history = prompt(50)
    first = run(engine, [ticket("t", history, max_new_tokens=6)])["t"]
    assert (first.cached_tokens, engine.counters.prefilled_tokens) == (0, 50)
    history = np.concatenate([history, first.token_ids, prompt(20, seed=1)])
    second = run(engine, [ticket("t", history, max_new_tokens=6)])["t"]
    # The last sampled token's own KV was never needed: it is computed with the observation.
    assert second.cached_tokens == 55
    assert engine.counters.prefilled_tokens == 50 + 21
    check_logprobs(versions, history, second)


def test_spans_of_versions_when_the_version_moves_while_sampling(versions: PublishedVersions) -> None:
    """S2: after 57 of 128 sampled tokens the version moves: (v7: 57), (v8: 71); S22: none is thrown away."""
    engine = stepper(versions, version=7)
    history = prompt(30)
    assert run(engine, [ticket("t", history, seed=3, max_new_tokens=128)], steps=57) == {}
    assert switch(engine, versions, 8) == 30 + 57 - 1
    generation = run(engine, [])["t"] if engine.tickets else None
    assert generation is not None
    assert generation.versions.tolist() == [7] * 57 + [8] * 71
    assert engine.counters.recomputed_tokens == 30 + 57 - 1
    check_logprobs(versions, history, generation)


def test_requests_of_every_length_survive_a_load(versions: PublishedVersions) -> None:
    """S22: 16 long requests running when the version moves: 0 lost, and what they sampled before stays."""
    engine = stepper(versions, num_slots=16, budget=64)
    histories = [prompt(10 + 3 * i, seed=i) for i in range(16)]
    asked = [ticket(f"t{i}", h, i, max_new_tokens=40) for i, h in enumerate(histories)]
    assert run(engine, asked, steps=20) == {}
    before = [engine.table.history[s, : engine.table.length[s]].copy() for s in range(16)]
    switch(engine, versions, 1)
    finished = run(engine, [])
    assert len(finished) == 16
    for i, history in enumerate(histories):
        whole = np.concatenate([history, finished[f"t{i}"].token_ids])
        assert len(whole) == len(history) + 40
        slot_before = next(b for b in before if b[: len(history)].tolist() == history.tolist())
        assert whole[: len(slot_before)].tolist() == slot_before.tolist()
    check_logprobs(versions, histories[15], finished["t15"])


def test_no_token_from_an_old_cache(versions: PublishedVersions) -> None:
    """S23: the same prompt before and after a weight change, prefix cache on."""
    engine = stepper(versions)
    history = prompt(40)
    before = run(engine, [ticket("a", history, max_new_tokens=8)])["a"]
    switch(engine, versions, 1)
    for name in ("a", "b"):
        after = run(engine, [ticket(name, history, max_new_tokens=8)])[name]
        assert after.cached_tokens == (0 if name == "a" else 39)
        check_logprobs(versions, history, after)
        assert abs(after.logprobs[0] - before.logprobs[0]) > 1e-3
    assert engine.counters.recomputed_tokens == 40


def test_what_is_sampled_does_not_depend_on_batch_slot_or_engine(versions: PublishedVersions) -> None:
    history = prompt(30)
    alone = run(stepper(versions), [ticket("t", history, seed=11, max_new_tokens=30)])["t"]
    others = [ticket(f"o{i}", prompt(12 + 7 * i, seed=i), i, max_new_tokens=10 + 5 * i) for i in range(6)]
    crowd = run(stepper(versions, num_slots=7, budget=9), [*others, ticket("t", history, seed=11, max_new_tokens=30)])
    assert crowd["t"].token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(crowd["t"].logprobs, alone.logprobs, atol=1e-5)
    # In two turns, as after the loss of an engine: the noise goes on where it was.
    part = run(stepper(versions), [ticket("t", history, seed=11, max_new_tokens=12)])["t"]
    longer = np.concatenate([history, part.token_ids])
    rest = run(stepper(versions), [ticket("t", longer, seed=11, max_new_tokens=18)])["t"]
    assert [*part.token_ids.tolist(), *rest.token_ids.tolist()] == alone.token_ids.tolist()


def test_siblings_share_their_prompt_and_differ_by_seed(versions: PublishedVersions) -> None:
    """M21: a group's members share the prompt's KV, not the noise."""
    engine = stepper(versions, num_slots=8)
    history = prompt(60)
    group = run(engine, [ticket(f"m{i}", history, seed=i, max_new_tokens=10) for i in range(8)])
    assert len({tuple(member.token_ids.tolist()) for member in group.values()}) == 8
    assert engine.counters.prefilled_tokens == 60
    assert sorted(member.cached_tokens for member in group.values()) == [0] + [59] * 7
    for member in group.values():
        check_logprobs(versions, history, member)


def test_a_full_context_ends_a_request(versions: PublishedVersions) -> None:
    """S15: prompt 400, context 512, ask 200: 112 tokens, then a clean end."""
    engine = stepper(versions)
    generation = run(engine, [ticket("t", prompt(400), max_new_tokens=200)])["t"]
    assert len(generation.token_ids) == 112
    assert generation.finish_reason == "context"
    exact = run(engine, [ticket("u", prompt(400, seed=1), max_new_tokens=112)])["u"]
    assert (len(exact.token_ids), exact.finish_reason) == (112, "length")


def test_a_stop_token_is_the_last_one(versions: PublishedVersions) -> None:
    free = run(stepper(versions), [ticket("t", prompt(20), max_new_tokens=20)])["t"].token_ids.tolist()
    stop = free[5]
    stopped = run(stepper(versions), [ticket("t", prompt(20), max_new_tokens=20, stop_token_ids=(999, stop))])["t"]
    assert stopped.token_ids.tolist() == free[: free.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_greedy_is_the_argmax_of_transformers(versions: PublishedVersions) -> None:
    history = prompt(20)
    generation = run(stepper(versions), [ticket("t", history, max_new_tokens=10, greedy=True)])["t"]
    logprobs = full_recompute(versions.path, None, [*history.tolist(), *generation.token_ids.tolist()])
    assert generation.token_ids.tolist() == logprobs[19:-1].argmax(-1).tolist()
    check_logprobs(versions, history, generation)


def test_running_requests_go_on_beside_a_long_prompt(versions: PublishedVersions) -> None:
    engine = stepper(versions, budget=20)
    run(engine, [ticket("short", prompt(5), max_new_tokens=30)], steps=2)
    assert engine.admit(ticket("long", prompt(100, seed=1), max_new_tokens=1))
    finished: list[str] = []
    steps = 0
    while "long" not in finished:
        steps += 1
        with torch.inference_mode():
            finished += [generation.request_id for _, generation in engine.step()]
    assert steps == 5
    assert engine.table.length[engine.table.slot_of["short"]] == 5 + 2 + 5


def test_timings_add_up(versions: PublishedVersions) -> None:
    engine = stepper(versions)
    ticks = iter(np.arange(1000, dtype=float).tolist())
    engine.clock = lambda: next(ticks)
    generation = run(engine, [ticket("t", prompt(5), max_new_tokens=3)])["t"]
    assert generation.queue_s >= 0 and generation.prefill_s > 0 and generation.decode_s > 0
    counters = engine.counters
    assert counters.busy_s == pytest.approx(counters.prefill_s + counters.decode_s)
    assert counters.num_steps == 3
