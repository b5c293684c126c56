"""The pipeline benchmark: its bounds, its measure of a score, and its plane with almost no waiting."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from benchmarks.pipeline import iterations_headline
from benchmarks.pipeline_plane import play
from benchmarks.pipeline_score import paired_ratios, score_headline, seconds_to, trailing_success
from benchmarks.pipeline_workloads import PIPELINES, WaitingEnvironment, Workload
from benchmarks.slow_environments import SLOW
from resources.environments.base import ScriptedExpert
from resources.environments.family import FamilyConfig
from resources.environments.registry import make_environment, quickstart_families


def test_bounds_are_those_of_the_schedules() -> None:
    balanced = [pipeline.bound_s([1.0, 3.0], 2.0) for pipeline in PIPELINES]
    assert balanced == [4.0, 2.5, 2.0, 2.0, 2.0]
    heavy = [pipeline.bound_s([3.0], 1.0) for pipeline in PIPELINES]
    assert heavy == [4.0, 3.0, 2.0, 4 / 3, 1.0]
    tails = [pipeline.bound_s([4.0, 8.0], 2.0) for pipeline in PIPELINES]
    assert tails == [8.0, 6.0, 4.0, 8 / 3, 2.0]


def test_speedups_are_geometric_means_over_workloads() -> None:
    def rows(workload, seconds, bounds):
        return [
            {"workload": workload, "pipeline": p.name, "iteration_s": s, "bound_s": b, "over_bound": s / b - 1}
            for p, s, b in zip(PIPELINES[:3], seconds, bounds, strict=True)
        ]

    headline = iterations_headline(
        [*rows("a", (4.0, 2.0, 2.0), (4.0, 2.0, 1.0)), *rows("b", (8.0, 8.0, 1.0), (8.0, 8.0, 1.0))]
    )
    assert headline["speedup_vs_synchronous"]["value"] == pytest.approx(4.0)
    assert headline["speedup_vs_synchronous"]["bound"] == pytest.approx(32**0.5)
    assert headline["speedup_vs_one_off"]["value"] == pytest.approx(8**0.5)
    assert headline["excess_over_bound, a"]["value"] == pytest.approx(1.0)
    assert headline["excess_over_bound, b"]["value"] == 0.0


def test_a_score_is_reached_when_its_trailing_mean_is() -> None:
    success = [1.0, 0.2, 0.6, 0.7, 0.8, 0.9]
    rows = [
        {"success/a": s, "success/b": s, "time/started_at": 100.0, "recorded_at": 110.0 + i}
        for i, s in enumerate(success)
    ]
    assert trailing_success(rows, ["a", "b"])[2:] == pytest.approx([0.6, 0.5, 0.7, 0.8])
    assert seconds_to(0.6, rows, ["a", "b"]) == 12.0, "one lucky batch is no score, three are needed"
    assert seconds_to(0.7, rows, ["a", "b"]) == 14.0
    assert seconds_to(0.9, rows, ["a", "b"]) is None
    rows[2]["success/b"] = rows[3]["success/b"] = 0.0  # every family counts alike
    assert seconds_to(0.7, rows, ["a", "b"]) is None


def test_only_seeds_that_reached_the_score_are_compared() -> None:
    rows = [
        {"pipeline": name, "seed": seed, "time_to_score_s": seconds}
        for seed, of_seed in enumerate([(30.0, 20.0, 10.0), (40.0, None, 10.0), (None, 20.0, 10.0)])
        for name, seconds in zip([p.name for p in PIPELINES[:3]], of_seed, strict=True)
    ]
    assert paired_ratios(rows, "synchronous", "asynchronous, alpha 1") == [3.0, 4.0]
    headline = score_headline(rows)
    assert headline["time_to_score_vs_synchronous"]["value"] == 3.5
    assert headline["time_to_score_vs_one_off"]["value"] == 2.0


def test_the_same_work_waits_alike_in_every_pipeline() -> None:
    async def latencies() -> list[list[float]]:
        WaitingEnvironment.begin_run()
        drawn = []
        for seed in (1, 1, 2):
            environment = WaitingEnvironment(step_s=2.0, sigma=1.0)
            await environment.reset(seed)
            drawn.append([environment.next_latency_s() for _ in range(400)])
        return drawn

    first, second = asyncio.run(latencies()), asyncio.run(latencies())
    assert first == second and first[0] != first[1] != first[2]
    assert statistics.mean(first[0] + first[1] + first[2]) == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("pipeline", PIPELINES[:3], ids=lambda pipeline: pipeline.name)
def test_the_plane_plays_a_workload_through_a_pipeline(pipeline) -> None:
    played = play(Workload("tiny", step_s=0.001, sigma=0.5, training_share=1.0), pipeline, 0.001, 3)
    assert len(played.loads) == len(played.waves_s) == 3 and played.loads == sorted(played.loads)
    assert sum(played.lags.values()) == 3 * 8 * 4
    wanted = {"synchronous": {0}, "one_off": {0, 1}}.get(pipeline.pipeline)
    assert set(played.lags) == wanted if wanted else max(played.lags) <= pipeline.max_staleness


def test_slow_environments_play_what_the_quickstart_plays() -> None:
    async def main() -> None:
        for family in quickstart_families().values():
            slow = FamilyConfig(environment=SLOW[family.environment], arguments={"latency_s": 0.0}, hardware_class="c")
            one, other = make_environment(family), make_environment(slow)
            assert isinstance(one, ScriptedExpert) and isinstance(other, ScriptedExpert)
            assert await one.reset(5) == await other.reset(5)
            action = one.expert_action()
            assert action == other.expert_action() and await one.step(action) == await other.step(action)

    asyncio.run(main())
