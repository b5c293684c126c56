from __future__ import annotations

import threading

import pytest

from resources.rewards.autoscaler import Autoscaler, decide
from resources.rewards.autoscaler_thread import MAX_BACK_OFF_S, AutoscalerThread
from resources.rewards.config import RewardsConfig
from resources.rewards.queue import Backlog

CONFIG = RewardsConfig(max_replicas=3, target_backlog_per_replica=10, launch_timeout_s=30)


class PaperPool:
    """A pool on paper: launches are noted, and register when the test says so."""

    def __init__(self, config: RewardsConfig = CONFIG) -> None:
        self.now = 0.0
        self.num_unfinished = 0
        self.alive: set[str] = set()
        self.num_asked = 0
        self.num_registered = 0
        self.fails_with: Exception | None = None
        self.autoscaler = Autoscaler(
            config,
            lambda: Backlog(num_unclaimed=self.num_unfinished, oldest_age_s=60.0),
            self.launch,
            lambda: self.alive,
            lambda: self.now,
        )

    def launch(self, num_replicas: int) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        self.num_asked += num_replicas

    def register(self, num_replicas: int) -> None:
        for _ in range(num_replicas):
            self.alive.add(f"replica-{self.num_registered}")
            self.num_registered += 1

    def tick(self, after_s: float = 0.5) -> int:
        self.now += after_s
        return self.autoscaler.tick().num_launched


@pytest.mark.parametrize(
    ("num_unclaimed", "num_in_flight", "age_s", "num_running", "num_pending", "num_launched"),
    [
        (0, 0, 0, 0, 0, 0),
        (1, 0, 0, 0, 0, 1),
        (10, 0, 0, 0, 0, 1),
        (11, 0, 0, 0, 0, 2),
        (1000, 0, 0, 0, 0, 3),
        (1000, 0, 9, 1, 0, 2),
        (1000, 0, 2, 1, 0, 0),
        (1000, 0, 2.1, 1, 0, 2),
        (1000, 0, 9, 1, 2, 0),
        (1000, 0, 9, 2, 5, 0),
        (5, 10, 9, 1, 0, 1),
        (5, 0, 9, 2, 0, 0),
        (0, 10, 0, 0, 0, 1),
        (0, 0, 0, 3, 0, 0),
    ],
)
def test_decide(num_unclaimed, num_in_flight, age_s, num_running, num_pending, num_launched):
    backlog = Backlog(num_unclaimed=num_unclaimed, num_in_flight=num_in_flight, oldest_age_s=age_s)
    assert decide(CONFIG, backlog, num_running=num_running, num_pending=num_pending) == num_launched


def test_decide_keeps_a_floor():
    for config, floor in [
        (RewardsConfig(start_ahead=True), 1),
        (RewardsConfig(min_replicas=2), 2),
        (RewardsConfig(min_replicas=2, start_ahead=True), 2),
    ]:
        assert decide(config, Backlog(), num_running=0, num_pending=0) == floor
        assert decide(config, Backlog(), num_running=floor, num_pending=0) == 0


def test_from_zero_to_the_maximum_and_back_to_zero():
    pool = PaperPool()
    assert pool.tick() == 0
    pool.num_unfinished = 100
    assert pool.tick() == 3
    pool.register(3)
    assert pool.tick() == 0
    pool.num_unfinished = 0
    assert pool.tick() == 0
    pool.alive.clear()  # each ended after its keep-alive
    assert pool.tick() == 0
    pool.num_unfinished = 1
    assert pool.tick() == 1
    assert pool.num_asked == 4


def test_a_slow_cold_start_is_asked_for_once():
    pool = PaperPool()
    pool.num_unfinished = 15
    assert [pool.tick() for _ in range(14)] == [2] + [0] * 13  # seven seconds
    pool.register(1)
    assert pool.tick() == 0
    assert pool.autoscaler.num_pending == 1
    pool.num_unfinished = 25
    assert pool.tick() == 1


def test_a_launch_that_comes_to_nothing_expires():
    pool = PaperPool()
    pool.num_unfinished = 1
    assert pool.tick() == 1
    assert pool.tick(29.9) == 0
    assert pool.tick(0.2) == 1
    assert (pool.autoscaler.num_expired, pool.autoscaler.num_pending) == (1, 1)


def test_a_replica_that_ended_is_not_taken_for_a_new_one():
    pool = PaperPool()
    pool.num_unfinished = 15
    pool.tick()
    pool.register(2)
    pool.tick()
    gone = pool.alive.pop()
    assert pool.tick() == 1
    pool.alive.add(gone)  # a sign of life that came late
    assert pool.tick() == 0
    assert pool.autoscaler.num_pending == 1


def test_a_launch_that_fails_halfway_counts_what_was_launched():
    pool = PaperPool()
    pool.num_unfinished = 100
    launch = pool.autoscaler._launch

    def fail_at_the_second(num_replicas: int) -> None:
        if pool.num_asked == 1:
            raise RuntimeError("server is busy")
        launch(num_replicas)

    pool.autoscaler._launch = fail_at_the_second
    with pytest.raises(RuntimeError, match="server is busy"):
        pool.tick()
    assert pool.autoscaler.num_pending == 1
    pool.autoscaler._launch = launch
    assert pool.tick() == 2


def test_a_failed_launch_is_said_counted_and_tried_again_later(caplog):
    pool = PaperPool()
    thread = AutoscalerThread(pool.autoscaler, period_s=0.5)
    pool.num_unfinished = 1
    pool.fails_with = ValueError("rewards.work_pool 'rewards' does not exist: run `make up`")
    thread.look()
    thread.look()
    assert thread.last_error == "ValueError: rewards.work_pool 'rewards' does not exist: run `make up`"
    assert (thread.num_failures, thread.num_failures_in_a_row, thread.pause_s()) == (2, 2, 2.0)
    assert "does not exist" in caplog.text
    for _ in range(20):
        thread.look()
    assert thread.pause_s() == MAX_BACK_OFF_S
    pool.fails_with = None
    thread.look()
    assert (thread.num_failures_in_a_row, thread.pause_s()) == (0, 0.5)
    assert thread.last_error is not None  # asked for, not there yet
    pool.register(1)
    thread.look()
    assert (thread.last_error, thread.num_replicas, thread.num_failures) == (None, 1, 22)


def test_replicas_that_never_register_become_the_last_error():
    pool = PaperPool()
    thread = AutoscalerThread(pool.autoscaler, period_s=0.5)
    pool.num_unfinished = 1
    thread.look()
    assert thread.last_error is None
    pool.now += 31
    thread.look()
    assert thread.last_error is not None
    assert "1 reward replicas were asked for and did not register" in thread.last_error
    pool.num_unfinished = 0
    thread.look()
    assert thread.last_error is None


def test_the_history_keeps_every_change_and_the_ends_of_what_stays():
    pool = PaperPool()
    thread = AutoscalerThread(pool.autoscaler, period_s=0.5)
    for num_unfinished in (0, 0, 0, 0, 15, 15, 0):
        pool.now += 1
        pool.num_unfinished = num_unfinished
        thread.look()
    history = [(s.at, s.num_unclaimed, s.num_pending, s.num_launched) for s in thread.history()]
    assert history == [(1, 0, 0, 0), (4, 0, 0, 0), (5, 15, 2, 2), (6, 15, 2, 0), (7, 0, 2, 0)]


def test_the_thread_looks_survives_and_stops():
    pool = PaperPool()
    pool.num_unfinished = 1
    pool.fails_with = RuntimeError("not yet")
    launched = threading.Event()

    def launch(num_replicas: int) -> None:
        if thread.num_failures < 2:
            raise RuntimeError("not yet")
        launched.set()

    pool.autoscaler._launch = launch
    with AutoscalerThread(pool.autoscaler, period_s=0.001) as thread:
        assert launched.wait(timeout=20)
    assert thread._thread is not None
    assert not thread._thread.is_alive()
    assert thread.num_failures == 2
