"""The benchmarks over simulated engines, at sizes that take a second: what they play and what they count is right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks import rollout_async, scale, weight_sync
from benchmarks.simulated_plane import draw_latency
from flows.config import load_run_file
from flows.opening import check_inputs


@pytest.mark.parametrize("stepping", ["trajectory", "batch"])
def test_every_trajectory_is_played_to_its_end(tmp_path: Path, stepping: str) -> None:
    setting = rollout_async.Setting("", slots=4, engine_slots=4096, scale=100.0)
    took = asyncio.run(rollout_async.play(tmp_path, setting, 8, 1.0, stepping, seed=3))
    lower, _ = rollout_async.bounds(setting, 8, 1.0, seed=3)
    assert took >= lower, "nothing ends before the bound: the latencies are really waited for"


def test_bounds_are_those_of_the_latencies() -> None:
    one = rollout_async.TURNS * (rollout_async.LATENCY_S + rollout_async.GENERATION_S)
    lower, upper = rollout_async.bounds(rollout_async.Setting("", 2, 1000, 1.0), 6, 0.0, seed=0)
    assert (lower, upper) == (pytest.approx(3 * one), pytest.approx(4 * one))
    lower, _ = rollout_async.bounds(rollout_async.Setting("", 6, 1, 1.0), 120, 0.0, seed=0)
    assert lower == pytest.approx(20 * one), "slots of environments are what is short"
    lower, _ = rollout_async.bounds(rollout_async.Setting("", 120, 1, 1.0), 120, 0.0, seed=0)
    assert lower == pytest.approx(120 * 10.0), "the engine is"
    draws = [draw_latency(seed, turn, 10.0, 10.0) for seed in range(50) for turn in range(10)]
    assert min(draws) == 0.0 and max(draws) > 30.0 and len(set(draws)) > 400
    assert draw_latency(3, 4, 10.0, 2.0) == draw_latency(3, 4, 10.0, 2.0)


@pytest.mark.parametrize("place", scale.PLACES)
def test_a_row_counts_those_that_wait(tmp_path: Path, place: str) -> None:
    row = asyncio.run(scale.measure(tmp_path, 80, place, True, 1.0))
    assert row["stages"].startswith(f"{{'{place}'") and row["turns/s"] > 0
    assert 0 < row["allocated bytes"] < 40 * scale.ALLOWED_BYTES
    assert row["token bytes"] >= 17


def test_a_transfer_is_hidden_or_exposed() -> None:
    def iteration(recorded_at: float, exposed: float, load: float, total: float) -> dict[str, float]:
        weights = {"weights/exposed_s": exposed, "weights/load_s": load, "weights/total_s": total}
        return {"recorded_at": recorded_at, "weights/recomputed_tokens": 10, **weights}

    cold = [iteration(0.0, 9.0, 9.0, 9.0)] * weight_sync.COLD
    found = weight_sync.transfers([*cold, iteration(5.0, 0.1, 0.02, 0.92), iteration(9.0, 0.1, 0.02, 0.92)])
    assert found["iteration s"] == 4.0
    assert found["total s"] == pytest.approx(1.0) and found["hidden share"] == pytest.approx(0.9)


def test_requests_are_counted() -> None:
    link = {"num_requests": 20, "num_generations": 15, "num_refused": 0, "in_flight": 3}
    rows = [{"evicted_stale.trajectories": 1}, {"workers": [{"proxy": {"num_rerouted": 0, "engines": {"e": link}}}]}]
    found = weight_sync.losses(rows)
    assert (found["requests"], found["requests lost"], found["answers thrown away"]) == (20, 1, 0)


@pytest.mark.parametrize("name", weight_sync.LOADS)
def test_the_simulated_run_is_one_that_train_accepts(tmp_path: Path, name: str) -> None:
    config = load_run_file(weight_sync.simulated_run(tmp_path, weight_sync.LOADS[name]))
    check_inputs(config.model_copy(update={"store": str(tmp_path / "store")}))
