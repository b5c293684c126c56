"""The reward queue: claims, leases and answers."""

from __future__ import annotations

import threading

import pytest

from resources.failures import FailureClass
from resources.object_store import ObjectStore
from resources.rewards.base import ScoringRequest
from resources.rewards.queue import QUEUE, Backlog, RewardQueue
from resources.rewards.results import RESCAN_S, RewardResults
from tests.claimed_rewards import LEASE_S, SKEW_S, HandClock, claimed, requests, scores


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


def another(queue: RewardQueue, store: ObjectStore, clock: HandClock, **arguments) -> RewardQueue:
    return RewardQueue(store, queue.run_id, clock_skew_s=SKEW_S, clock=clock, **arguments)


def test_a_batch_goes_from_submission_to_result(queue, results, store, clock):
    asked = requests("a", "b")
    request_id = queue.submit(asked)
    assert queue.backlog() == Backlog(num_unclaimed=2, num_unclaimed_batches=1)

    claim = claimed(queue, "r1")
    assert (claim.request_id, claim.attempt, claim.owner) == (request_id, 1, "r1")
    assert list(claim.requests) == asked
    assert queue.backlog() == Backlog(num_in_flight=2, num_in_flight_batches=1)
    assert another(queue, store, clock).claim("r2", LEASE_S) is None

    answered = scores(claim, 1.0)
    assert queue.complete(claim, answered) is True
    seen: set[str] = set()
    assert results.read_new(seen) == [(request_id, answered)]
    assert seen == {request_id}
    assert results.read_new(seen) == []
    assert queue.backlog() == Backlog()


def test_nothing_but_the_result_is_left(queue, results, store):
    request_id = queue.submit(requests("a"))
    claim = claimed(queue, "r1")
    queue.complete(claim, scores(claim, 1.0))
    results.read_new(set())
    assert store.list("runs/run") == [f"runs/run/rewards/results/{request_id}.arrow"]


def test_batches_are_claimed_oldest_first_from_one_listing(queue, clock, monkeypatch):
    ids = []
    for name in "abc":
        ids.append(queue.submit(requests(name)))
        clock.now += 0.1
    listed = []
    listing = type(queue.store).list
    monkeypatch.setattr(type(queue.store), "list", lambda self, prefix: listed.append(prefix) or listing(self, prefix))
    assert [claimed(queue, "r").request_id for _ in ids] == ids
    assert listed == [QUEUE]
    assert queue.claim("r", LEASE_S) is None
    assert listed == [QUEUE, QUEUE]


def test_a_live_lease_is_respected_and_an_expired_one_is_stolen(queue, store, clock):
    queue.submit(requests("a"))
    dead = claimed(queue, "dead")
    thief = another(queue, store, clock)
    clock.now += LEASE_S + SKEW_S - 0.01  # its own clock may be slow by the skew
    assert thief.claim("thief", LEASE_S) is None
    clock.now += 0.02
    assert thief.backlog() == Backlog(
        num_unclaimed=1, num_unclaimed_batches=1, oldest_age_s=pytest.approx(LEASE_S + SKEW_S + 0.01)
    )
    stolen = claimed(thief, "thief")
    assert (stolen.request_id, stolen.attempt, stolen.owner) == (dead.request_id, 2, "thief")


def test_a_renewed_lease_is_not_stolen(queue, store, clock):
    queue.submit(requests("a"))
    claim = claimed(queue, "slow")
    thief = another(queue, store, clock)
    assert thief.claim("thief", LEASE_S) is None  # it has now read when the lease expires
    clock.now += LEASE_S - 1
    claim = queue.renew(claim, LEASE_S)
    clock.now += LEASE_S - 1
    assert thief.claim("thief", LEASE_S) is None
    clock.now += 1 + SKEW_S
    assert claimed(thief, "thief").attempt == 2


def test_an_expired_lease_is_not_renewed(queue, store, clock):
    queue.submit(requests("a"))
    claim = claimed(queue, "slow")
    clock.now += LEASE_S
    assert queue.renew(claim, LEASE_S) == claim
    clock.now += SKEW_S
    assert claimed(another(queue, store, clock), "thief").attempt == 2


def test_a_late_duplicate_is_ignored(queue, store, clock):
    """S26: the attempt whose lease expired answers after the one that took over; and the other way round."""
    for first_to_answer, second_to_answer in [("slow", "thief"), ("thief", "slow")]:
        queue.submit(requests(first_to_answer))
        claims = {"slow": claimed(queue, "slow")}
        clock.now += LEASE_S + SKEW_S
        other = another(queue, store, clock)
        claims["thief"] = claimed(other, "thief")
        reader = RewardResults(store, "run", clock=clock)
        seen: set[str] = set()
        reader.read_new(seen)

        assert queue.complete(claims[first_to_answer], scores(claims[first_to_answer], 1.0)) is True
        assert [[s.reward for s in batch] for _, batch in reader.read_new(seen)] == [[1.0]]
        assert other.complete(claims[second_to_answer], scores(claims[second_to_answer], 0.0)) is False
        assert reader.read_new(seen) == []
        clock.now += RESCAN_S
        assert reader.read_new(seen) == []
        assert other.claim("anybody", LEASE_S) is None


def test_attempts_are_capped_and_end_as_unscored(queue, results, store, clock, caplog):
    request_id = queue.submit(requests("a", "b"))
    for attempt in (1, 2, 3):
        assert claimed(queue, f"dies-{attempt}").attempt == attempt
        clock.now += LEASE_S + SKEW_S
    assert queue.claim("r4", LEASE_S) is None
    [(answered, batch)] = results.read_new(set())
    assert answered == request_id
    assert [(s.trajectory_id, s.reward, s.failure) for s in batch] == [
        ("run/a", None, FailureClass.REWARD),
        ("run/b", None, FailureClass.REWARD),
    ]
    assert "within 3 attempts" in batch[0].failure_message
    assert "its 2 trajectories stay unscored" in caplog.text
    assert store.list(f"runs/run/{QUEUE}") == []


def test_a_batch_that_was_given_back_is_free_at_once_and_no_attempt_is_counted(queue, store, clock):
    queue.submit(requests("a"))
    queue.release(claimed(queue, "stopped"))
    assert claimed(another(queue, store, clock), "next").attempt == 1


def test_a_replica_that_dies_after_its_result_leaves_a_clean_up_and_no_second_scoring(queue, store, clock):
    request_id = queue.submit(requests("a"))
    claim = claimed(queue, "dies")
    queue.complete(claim, scores(claim, 1.0))
    run = store.sub("runs/run")  # undo all that comes after the result
    run.delete(f"{QUEUE}/fresh/{request_id}")
    again = another(queue, store, clock).submit(requests("a"))
    run.put(f"{QUEUE}/requests/{request_id}.arrow", run.get(f"{QUEUE}/requests/{again}.arrow"))
    run.delete(f"{QUEUE}/requests/{again}.arrow")
    run.put_json(f"{QUEUE}/claims/{request_id}.1", {"owner": "dies", "expires_at": clock.now - 100})

    heir = another(queue, store, clock)
    assert heir.claim("heir", LEASE_S) is None
    assert run.list(QUEUE) == [f"{QUEUE}/fresh/{request_id}"]
    assert [s.reward for _, batch in RewardResults(store, "run", clock=clock).read_new(set()) for s in batch] == [1.0]


def test_a_claim_without_a_request_goes_away_once_expired(queue, store, clock):
    run = store.sub("runs/run")
    run.put_json(f"{QUEUE}/claims/0000000000001-abcdefab-0001.2", {"owner": "x", "expires_at": clock.now + 1})
    assert queue.claim("r", LEASE_S) is None
    assert len(run.list(QUEUE)) == 1
    clock.now += 1 + SKEW_S
    assert queue.claim("r", LEASE_S) is None
    assert run.list(QUEUE) == []


def test_an_unreadable_request_is_set_aside_aloud(queue, store, caplog):
    run = store.sub("runs/run")
    run.put(f"{QUEUE}/requests/0000000000001-abcdefab-0001.arrow", b"not arrow")
    queue.submit(requests("a"))
    assert claimed(queue, "r").requests[0].trajectory_id == "run/a"
    assert run.get(f"{QUEUE}/rejected/0000000000001-abcdefab-0001.arrow") == b"not arrow"
    assert "cannot be read" in caplog.text


def test_every_batch_is_answered_exactly_once_by_two_concurrent_replicas(store):
    answer_with_two_concurrent_replicas(store, num_batches=40)


@pytest.mark.s3
def test_every_batch_is_answered_exactly_once_on_s3(s3_url):
    answer_with_two_concurrent_replicas(ObjectStore.open(s3_url), num_batches=8)


def answer_with_two_concurrent_replicas(store: ObjectStore, num_batches: int) -> None:
    """Two claimants with expired leases all around: each result counts once, whoever was late."""
    submitter = RewardQueue(store, "run")
    ids = {submitter.submit(requests(str(i))) for i in range(num_batches)}
    firsts: list[str] = []
    ready = threading.Barrier(2)

    def work(owner: str) -> None:
        # With leases that are over at once, both replicas also score the same batches.
        queue = RewardQueue(store, "run", max_attempts=1000, clock_skew_s=0.0)
        ready.wait(timeout=10)
        while queue.backlog().num_unfinished:
            claim = queue.claim(owner, lease_s=-1.0)
            if claim is not None and queue.complete(claim, scores(claim, 1.0)):
                firsts.append(claim.request_id)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in ("r1", "r2")]
    for thread in threads:
        thread.start()
    reader = RewardResults(store, "run")
    seen: set[str] = set()
    answered: list[str] = []
    for thread in threads:
        while thread.is_alive():
            answered += [s.trajectory_id for _, batch in reader.read_new(seen) for s in batch]
            thread.join(timeout=0.005)
    answered += [s.trajectory_id for _, batch in reader.read_new(seen) for s in batch]
    assert sorted(firsts) == sorted(ids)
    assert sorted(answered) == sorted(f"run/{i}" for i in range(num_batches))
    assert seen == ids


def test_wrong_use_is_refused(queue):
    with pytest.raises(ValueError, match="submit at least one"):
        queue.submit([])
    with pytest.raises(ValueError, match=r"judgement of 'run/a' \(family 'f'\) is not JSON"):
        queue.submit([ScoringRequest("run/a", "f", "s", "1", {"value": object()})])
    queue.submit(requests("a"))
    claim = claimed(queue, "r")
    with pytest.raises(ValueError, match="is answered for"):
        queue.complete(claim, [])
