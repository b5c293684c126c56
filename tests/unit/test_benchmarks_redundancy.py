"""The worlds of the redundancy benchmark: who is slow, and what a perfect scheduler needs."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from benchmarks.redundancy_faults import LATENCY_S, NUM_TURNS, SLOW_FACTOR, World


def slow_seats(world: World) -> np.ndarray:
    """Groups and members that take many times the usual time."""
    usual = NUM_TURNS * LATENCY_S[0]
    return world.latencies_GMT.sum(axis=2) > usual * SLOW_FACTOR / 2


def test_faults_hit_single_environments_or_whole_groups():
    shares = []
    for seed in range(50):
        shares.append(slow_seats(World("independent", 32, 8, seed)).mean())
        correlated = slow_seats(World("correlated", 32, 8, seed))
        assert correlated.any() and (correlated.all(axis=1) == correlated.any(axis=1)).all()
    assert 0.015 < statistics.fmean(shares) < 0.025


def test_the_ideal_is_the_wanted_group_of_the_wanted_member():
    world = World("independent", 33, 9, seed=0)
    world.latencies_GMT = np.zeros((33, 9, NUM_TURNS))
    world.latencies_GMT[:, 8, 0] = 50.0  # the spare member of every group
    world.latencies_GMT[32, :, 0] = 70.0  # the spare group
    world.latencies_GMT[3, 2, 0] = 20.0
    assert world.ideal_s() == 20.0, "group 3 needs its slow member: its spare is slower"
    world.latencies_GMT[3, 8, 0] = 10.0
    assert world.ideal_s() == 10.0


@pytest.mark.parametrize(("model", "winner"), [("independent", (32, 9)), ("correlated", (36, 8))])
def test_where_faults_lie_decides_what_helps(model, winner):
    """Alone: one more member each; by group: more groups. Both cost 288 environments instead of 256."""

    def mean_s(shape: tuple[int, int]) -> float:
        return statistics.fmean(World(model, *shape, seed).ideal_s() for seed in range(100))

    times = {shape: mean_s(shape) for shape in ((32, 8), (36, 8), (32, 9))}
    assert min(times, key=times.__getitem__) == winner
    assert times[32, 8] / times[winner] > 2.0


def test_members_of_a_group_have_seats_of_their_own():
    world = World("independent", 2, 2, seed=0)
    assert [world.seat(seed) for seed in (7, 9, 7, 9)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
