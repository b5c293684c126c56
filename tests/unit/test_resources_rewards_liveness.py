from __future__ import annotations

import time

import pytest

from resources.object_store import ObjectStore
from resources.rewards.liveness import (
    REPLICAS,
    RUN_DRIVER,
    RUN_HEARTBEAT,
    Beacon,
    ReplicaWatch,
    RunHeartbeat,
    Watch,
    has_driver,
)
from tests.claimed_rewards import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return ObjectStore.open(tmp_path)


def test_silence_is_measured_by_the_watchers_clock_alone(store, clock, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 9e9)  # the writer's clock is decades ahead
    beacon = Beacon(store, "sign")
    beacon.beat()
    watch = Watch(store, "sign", clock)
    assert watch.silent_s() == 0
    clock.now += 7
    assert watch.silent_s() == 7
    beacon.beat()
    assert watch.silent_s() == 0
    assert watch.ended is False
    beacon.beat(ended=True)
    watch.silent_s()
    assert watch.ended is True


def test_a_sign_never_seen_counts_from_the_start(store, clock):
    watch = Watch(store, "sign", clock)
    clock.now += 3
    assert watch.silent_s() == 3


def test_a_writer_that_starts_again_is_noticed(store, clock):
    Beacon(store, "sign").beat()
    watch = Watch(store, "sign", clock)
    watch.silent_s()
    clock.now += 5
    Beacon(store, "sign").beat()  # beat 1 again, at another time
    assert watch.silent_s() == 0


def test_replicas_are_counted_while_they_live(store, clock):
    def beacon(owner: str) -> Beacon:
        return Beacon(store, f"runs/run/{REPLICAS}/{owner}.json")

    watch = ReplicaWatch(store, "run", timeout_s=10, clock=clock)
    assert watch.running() == set()
    one, two = beacon("one"), beacon("two")
    one.beat()
    two.beat()
    assert watch.running() == {"one", "two"}
    clock.now += 9
    one.beat()
    assert watch.running() == {"one", "two"}
    clock.now += 1  # two was killed
    assert watch.running() == {"one"}
    one.beat(ended=True)
    assert watch.running() == set()


def test_the_runs_heartbeat_beats_and_says_when_it_ends(store):
    key = f"runs/run/{RUN_HEARTBEAT}"
    with RunHeartbeat(store, "run", period_s=0.01):
        assert store.get_json(key)["ended"] is False
        end = time.monotonic() + 20
        while store.get_json(key)["beat"] < 3:
            assert time.monotonic() < end, "no third heartbeat within 20 s"
            time.sleep(0.005)
    assert store.get_json(key)["ended"] is True


def test_a_driver_lives_while_its_sign_changes(store, clock):
    beacon = Beacon(store.sub("runs/r"), RUN_DRIVER, {"life": 0})
    pauses: list[float] = []

    def pass_time(seconds: float) -> None:
        pauses.append(seconds)
        clock.now += seconds

    def pass_time_with_beats(seconds: float) -> None:
        pass_time(seconds)
        if len(pauses) == 3:
            beacon.beat()

    assert not has_driver(store, "r", 0, 2.0, clock=clock, sleep=pass_time), "there is no sign"
    beacon.beat()
    assert pauses == []
    assert has_driver(store, "r", 0, 2.0, clock=clock, sleep=pass_time_with_beats)
    assert pauses == [0.5, 0.5, 0.5], "known with the first change"
    assert not has_driver(store, "r", 0, 2.0, clock=clock, sleep=pass_time), "killed: the sign stays as it is"
    assert sum(pauses) == 1.5 + 3 * 2.0
    beacon.beat(ended=True)
    pauses.clear()
    assert not has_driver(store, "r", 0, 2.0, clock=clock, sleep=pass_time)
    assert pauses == []


def test_a_claimed_life_is_waited_for(store, clock):
    """Its driver has claimed it and is about to give its first sign; the sign there is of the life before."""
    Beacon(store.sub("runs/r"), RUN_DRIVER, {"life": 0}).beat(ended=True)
    pauses: list[float] = []

    def pass_time(seconds: float) -> None:
        pauses.append(seconds)
        clock.now += seconds
        if len(pauses) == 2:
            Beacon(store.sub("runs/r"), RUN_DRIVER, {"life": 1}).beat()

    assert has_driver(store, "r", 1, 2.0, clock=clock, sleep=pass_time)
    assert len(pauses) == 2
    assert not has_driver(store, "r", 2, 2.0, clock=clock, sleep=pass_time), "a claim whose driver died at once"
    assert sum(pauses) == 1.0 + 3 * 2.0
