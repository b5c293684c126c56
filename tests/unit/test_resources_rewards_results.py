"""The one reader of a run's results: each of them once, whatever gets lost on the way."""

from __future__ import annotations

import pytest

from resources.object_store import ObjectStore
from resources.rewards.queue import QUEUE, RewardQueue
from resources.rewards.results import FORGET_S, RESCAN_S, RewardResults
from tests.claimed_rewards import SKEW_S, HandClock, claimed, requests, scores


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return ObjectStore.open(tmp_path)


@pytest.fixture
def queue(store, clock) -> RewardQueue:
    return RewardQueue(store, "run", clock_skew_s=SKEW_S, clock=clock)


@pytest.fixture
def results(store, clock) -> RewardResults:
    return RewardResults(store, "run", clock=clock)


def test_a_new_reader_gets_what_its_seen_lacks(queue, store, clock):
    """A reader that died after reading, before anything of it was recorded."""
    ids = []
    for name in "abc":
        ids.append(queue.submit(requests(name)))
        claim = claimed(queue, "r")
        queue.complete(claim, scores(claim, 1.0))
        clock.now += 0.01
    assert [i for i, _ in RewardResults(store, "run", clock=clock).read_new(set())] == ids
    resumed = RewardResults(store, "run", clock=clock)
    seen = set(ids[:1])
    assert [i for i, _ in resumed.read_new(seen)] == ids[1:]
    assert resumed.read_new(seen) == []


def test_a_poll_lists_the_markers_only(queue, results, clock, monkeypatch):
    seen: set[str] = set()
    results.read_new(seen)
    listed = []
    listing = type(queue.store).list
    monkeypatch.setattr(type(queue.store), "list", lambda self, prefix: listed.append(prefix) or listing(self, prefix))
    results.read_new(seen)
    assert listed == [f"{QUEUE}/fresh"]


def test_a_lost_marker_is_made_good_by_the_next_rescan(queue, results, store, clock):
    seen: set[str] = set()
    results.read_new(seen)
    request_id = queue.submit(requests("a"))
    claim = claimed(queue, "r")
    queue.complete(claim, scores(claim, 1.0))
    store.delete(f"runs/run/{QUEUE}/fresh/{request_id}")
    assert results.read_new(seen) == []
    clock.now += RESCAN_S
    assert [i for i, _ in results.read_new(seen)] == [request_id]


def test_a_read_that_fails_loses_nothing(queue, results, store, clock, monkeypatch):
    ids = []
    for name in "ab":
        ids.append(queue.submit(requests(name)))
        claim = claimed(queue, "r")
        queue.complete(claim, scores(claim, 1.0))
        clock.now += 0.01
    seen: set[str] = set()
    get = type(queue.store).get

    def fail_on_the_second(self, key):
        if ids[1] in key:
            raise OSError("connection reset")
        return get(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(type(queue.store), "get", fail_on_the_second)
        with pytest.raises(OSError, match="connection reset"):
            results.read_new(seen)
    assert seen == set()
    assert [i for i, _ in results.read_new(seen)] == ids


def test_what_a_reader_remembers_does_not_grow_with_the_run(queue, results, store, clock):
    seen: set[str] = set()
    for number in range(20):
        queue.submit(requests(str(number)))
        claim = claimed(queue, "r")
        queue.complete(claim, scores(claim, 1.0))
        assert len(results.read_new(seen)) == 1, "each is read once, however much is forgotten"
        clock.now += 600.0
    assert len(seen) <= 8 and len(results._answered) <= 8
    assert RewardResults(store, "run", clock=clock).read_new(set()) != [], "a resumed reader still gets all of them"


def test_a_result_that_came_very_late_is_read(queue, results, clock):
    seen: set[str] = set()
    results.read_new(seen)
    request_id = queue.submit(requests("a"))
    clock.now += FORGET_S + 1
    claim = claimed(queue, "slow")
    queue.complete(claim, scores(claim, 1.0))
    assert [i for i, _ in results.read_new(seen)] == [request_id]


def test_a_trajectory_that_was_submitted_twice_is_answered_once(queue, results):
    queue.submit(requests("a"))
    queue.submit(requests("a", "b"))
    for _ in range(2):
        claim = claimed(queue, "r")
        queue.complete(claim, scores(claim, 1.0))
    answered = [s.trajectory_id for _, batch in results.read_new(set()) for s in batch]
    assert sorted(answered) == ["run/a", "run/b"]
