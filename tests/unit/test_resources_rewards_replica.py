from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from resources.failures import FailureClass
from resources.object_store import ObjectStore
from resources.rewards.base import Score, ScoringRequest
from resources.rewards.config import RewardsConfig
from resources.rewards.liveness import REPLICAS, RUN_HEARTBEAT, Beacon
from resources.rewards.queue import QUEUE, Backlog, RewardQueue
from resources.rewards.replica import ReplicaReport, serve_rewards
from resources.rewards.results import RewardResults
from tests.claimed_rewards import HandClock

CONFIG = RewardsConfig(keep_alive_s=20.0, max_lifetime_s=100.0, owner_timeout_s=30.0, lease_s=9.0, clock_skew_s=1.0)
PATIENCE_S = 60.0


class PaperScoring:
    """Scores one request at a time on the hand clock: each takes ``payload["seconds"]``, and is worth its reward."""

    def __init__(self, clock: HandClock, num_processes: int = 1) -> None:
        self.num_processes = num_processes
        self.clock = clock
        self.tasks: deque[tuple[Any, ScoringRequest]] = deque()
        self.ready_at: float | None = None
        self.most_waiting = 0
        self.closed = False
        self.arguments: list[Mapping[str, Any]] = []

    def submit(self, ticket: Any, request: ScoringRequest, arguments: Mapping[str, Any]) -> None:
        self.tasks.append((ticket, request))
        self.arguments.append(arguments)
        self.most_waiting = max(self.most_waiting, self.num_waiting())

    def num_waiting(self) -> int:
        return max(0, len(self.tasks) - 1)

    def wait(self, timeout_s: float) -> list[tuple[Any, Score]]:
        ticket, request = self.tasks[0]
        if self.ready_at is None:
            self.ready_at = self.clock.now + request.payload["seconds"]
        if self.ready_at > self.clock.now + timeout_s:
            self.clock.now += timeout_s
            return []
        self.clock.now = max(self.clock.now, self.ready_at)
        self.ready_at = None
        self.tasks.popleft()
        return [
            (ticket, Score(request.trajectory_id, request.scorer, request.scorer_version, request.payload["reward"]))
        ]

    def close(self) -> None:
        self.closed = True


class Stage:
    """A run with a heartbeat that follows the hand clock, and one replica."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.clock = HandClock()
        self.scoring = PaperScoring(self.clock)
        self.run_beacon = Beacon(store, f"runs/run/{RUN_HEARTBEAT}")
        self.run_is_alive = True
        self.pauses: list[float] = []
        self.at_pause: Callable[[], None] = lambda: None

    def queue(self) -> RewardQueue:
        return RewardQueue(self.store, "run", clock_skew_s=CONFIG.clock_skew_s, clock=self.clock)

    def submit(self, *names: str, seconds: float = 0.1) -> str:
        return self.queue().submit([
            ScoringRequest(f"run/{name}", "calculator", "exact_answer", "1", {"seconds": seconds, "reward": 1.0})
            for name in names
        ])  # fmt: skip

    def serve(self, owner: str = "replica", **arguments: Any) -> ReplicaReport:
        self.run_beacon.beat()
        return serve_rewards(
            self.queue(), CONFIG, owner=owner, scoring=self.scoring, clock=self.clock, sleep=self.sleep, **arguments
        )

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.now += seconds
        if self.run_is_alive:
            self.run_beacon.beat()
        self.at_pause()

    def results(self) -> dict[str, float | None]:
        return {
            s.trajectory_id: s.reward
            for _, batch in RewardResults(self.store, "run", clock=self.clock).read_new(set())
            for s in batch
        }


@pytest.fixture
def stage(tmp_path) -> Stage:
    return Stage(ObjectStore.open(tmp_path))


def test_it_serves_what_waits_and_ends_when_nothing_comes(stage):
    stage.submit("a", "b")
    stage.submit("c")
    report = stage.serve(scorer_arguments={"calculator": {"ignore_case": True}})
    assert stage.results() == {"run/a": 1.0, "run/b": 1.0, "run/c": 1.0}
    assert (report.num_batches, report.num_scores, report.num_unscored, report.num_late) == (2, 3, 0, 0)
    assert report.end_reason == "idle"
    assert report.lifetime_s == pytest.approx(0.3 + CONFIG.keep_alive_s, abs=1.0)
    assert stage.scoring.closed
    assert stage.scoring.arguments == [{"ignore_case": True}] * 3
    sign = stage.store.get_json(f"runs/run/{REPLICAS}/replica.json")
    assert (sign["ended"], sign["report"]["num_scores"]) == (True, 3)


def test_it_looks_often_when_busy_and_seldom_when_idle(stage):
    stage.serve()
    assert stage.pauses[:5] == [0.02, 0.04, 0.08, 0.16, 0.25]
    assert set(stage.pauses[4:]) == {0.25}
    stage.pauses.clear()
    stage.at_pause = lambda: stage.submit("late") if len(stage.pauses) == 7 else None
    stage.serve("another")
    assert stage.pauses[5:10] == [0.25, 0.25, 0.02, 0.04, 0.08]


def test_it_claims_no_more_than_keeps_it_busy(stage):
    for name in "abcdef":
        stage.submit(name)
    stage.serve()
    assert stage.scoring.most_waiting == 1
    assert len(stage.results()) == 6


def test_a_long_scoring_keeps_its_lease(stage):
    """S26's other half: no attempt is stolen from a replica that is alive, however long its batch takes."""
    stage.submit("a", "b", "c", seconds=12.0)
    thief = stage.queue()
    stolen = []
    wait = stage.scoring.wait

    def wait_while_others_look(timeout_s: float) -> list[tuple[Any, Score]]:
        finished = wait(timeout_s)
        stage.run_beacon.beat()
        if stage.scoring.tasks:
            stolen.append(thief.claim("thief", 9.0))
        return finished

    stage.scoring.wait = wait_while_others_look
    report = stage.serve()
    assert set(stolen) == {None}
    assert (report.num_batches, report.num_late, len(stage.results())) == (1, 0, 3)


def test_it_ends_after_its_lifetime_with_what_it_holds_done(stage):
    stage.submit("a", "b", seconds=1.0)

    def one_more() -> None:
        stage.submit("more", seconds=1.0)

    stage.at_pause = one_more
    report = stage.serve()
    assert report.end_reason == "max_lifetime"
    assert CONFIG.max_lifetime_s <= report.lifetime_s < CONFIG.max_lifetime_s + 3
    assert stage.queue().backlog().num_in_flight == 0


def test_it_ends_with_the_run(stage):
    def end_of_run() -> None:
        if len(stage.pauses) == 10:
            stage.run_is_alive = False
            stage.run_beacon.beat(ended=True)

    stage.at_pause = end_of_run
    report = stage.serve()
    assert report.end_reason == "run_ended"
    assert report.lifetime_s < sum(stage.pauses[:10]) + CONFIG.heartbeat_s + 0.3


def test_it_ends_when_the_run_is_silent_even_with_work(stage):
    for i in range(100):
        stage.submit(str(i), seconds=1.0)
    report = stage.serve()  # the paper run beats in the replica's pauses only, and there are none
    assert report.end_reason == "run_silent"
    assert CONFIG.owner_timeout_s <= report.lifetime_s < CONFIG.owner_timeout_s + CONFIG.heartbeat_s + 2
    assert stage.queue().backlog().num_in_flight == 0  # given back
    assert stage.queue().backlog().num_unclaimed == 100 - report.num_scores


def test_it_gives_back_what_it_holds_when_told_to_stop(stage):
    stage.submit("a", "b", seconds=60.0)
    report = stage.serve(should_stop=lambda: stage.clock.now > 1_000_002)
    assert report.end_reason == "stopped"
    assert stage.queue().backlog() == Backlog(
        num_unclaimed=2, num_unclaimed_batches=1, oldest_age_s=pytest.approx(2.25)
    )
    claim = stage.queue().claim("next", 9.0)
    assert claim is not None
    assert claim.attempt == 1


def test_it_gives_back_what_it_holds_when_interrupted(stage):
    stage.submit("a")

    def interrupt(timeout_s: float) -> list[tuple[Any, Score]]:
        raise KeyboardInterrupt

    stage.scoring.wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        stage.serve()
    assert stage.scoring.closed
    assert stage.queue().backlog().num_unclaimed == 1


def test_a_replica_killed_while_it_scores_costs_a_lease_and_nothing_else(stage):
    request_id = stage.submit("a")
    assert stage.queue().claim("killed", CONFIG.lease_s) is not None  # and is never heard of again
    report = stage.serve()
    assert (report.num_batches, stage.results()) == (1, {"run/a": 1.0})
    assert report.lifetime_s == pytest.approx(CONFIG.lease_s + CONFIG.clock_skew_s + CONFIG.keep_alive_s, abs=1.0)
    assert stage.store.list(f"runs/run/{QUEUE}") == []
    assert stage.store.exists(f"runs/run/rewards/results/{request_id}.arrow")


def test_two_replicas_score_everything_exactly_once(tmp_path):
    """Real processes, a real clock, a file store; one scorer loops for ever (S13), the pool goes on."""
    store = ObjectStore.open(tmp_path)
    config = RewardsConfig(keep_alive_s=0.5, idle_poll_s=0.05, scorer_processes=2)
    Beacon(store, f"runs/run/{RUN_HEARTBEAT}").beat()
    queue, results = RewardQueue(store, "run"), RewardResults(store, "run")
    for batch in range(12):
        queue.submit([
            ScoringRequest(f"run/{batch}-{i}", "f", "exact_answer", "1", {"answer": str(i), "expected": "1"})
            for i in range(4)
        ])  # fmt: skip
    looping = "tests.unit.misbehaving_scorers:LoopingScorer"
    queue.submit([ScoringRequest("run/loops", "f", looping, "1", {}, deadline_s=0.5)])
    reports: list[ReplicaReport] = []

    def work(owner: str) -> None:
        reports.append(serve_rewards(RewardQueue(store, "run"), config, owner=owner))

    threads = [threading.Thread(target=work, args=(owner,)) for owner in ("r1", "r2")]
    for thread in threads:
        thread.start()
    seen: set[str] = set()
    scores: list[Score] = []
    end = time.monotonic() + PATIENCE_S
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < end, f"replicas still serve after {PATIENCE_S} s: {queue.backlog()}"
        scores += [s for _, batch in results.read_new(seen) for s in batch]
        time.sleep(0.01)
    scores += [s for _, batch in results.read_new(seen) for s in batch]

    rewards = {s.trajectory_id: s.reward for s in scores}
    assert len(scores) == len(rewards) == 49
    assert all(rewards[f"run/{batch}-{i}"] == float(i == 1) for batch in range(12) for i in range(4))
    [loops] = [s for s in scores if s.trajectory_id == "run/loops"]
    assert (loops.reward, loops.failure) == (None, FailureClass.REWARD)
    assert sum(r.num_scores for r in reports) == 49
    assert sum(r.num_late for r in reports) == 0
    assert {r.end_reason for r in reports} == {"idle"}
