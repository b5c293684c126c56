from __future__ import annotations

import threading

import pytest

from resources.failures import FailureClass
from resources.object_store import ObjectStore
from resources.rewards.base import Score, ScoringRequest
from resources.rewards.leases import Claim
from resources.rewards.queue import FORGET_S, QUEUE, RESCAN_S, Backlog, RewardQueue

LEASE_S = 10.0
SKEW_S = 2.0


class HandClock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def requests(*names: str) -> list[ScoringRequest]:
    return [ScoringRequest(f"run/{name}", "calculator", "exact_answer", "1", {"answer": "7"}) for name in names]


def scores(claim: Claim, reward: float) -> list[Score]:
    return [Score(r.trajectory_id, r.scorer, r.scorer_version, reward, success=True) for r in claim.requests]


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    return ObjectStore.open(tmp_path)


@pytest.fixture
def queue(store, clock) -> RewardQueue:
    return RewardQueue(store, "run", clock_skew_s=SKEW_S, clock=clock)


def another(queue: RewardQueue, store: ObjectStore, clock: HandClock, **arguments) -> RewardQueue:
    return RewardQueue(store, queue.run_id, clock_skew_s=SKEW_S, clock=clock, **arguments)


def claimed(queue: RewardQueue, owner: str) -> Claim:
    claim = queue.claim(owner, LEASE_S)
    assert claim is not None
    return claim


def test_a_batch_goes_from_submission_to_result(queue, store, clock):
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
    assert queue.new_results(seen) == [(request_id, answered)]
    assert seen == {request_id}
    assert queue.new_results(seen) == []
    assert queue.backlog() == Backlog()


def test_nothing_but_the_result_is_left(queue, store):
    request_id = queue.submit(requests("a"))
    claim = claimed(queue, "r1")
    queue.complete(claim, scores(claim, 1.0))
    queue.new_results(set())
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
        reader = another(queue, store, clock)
        seen: set[str] = set()
        reader.new_results(seen)

        assert queue.complete(claims[first_to_answer], scores(claims[first_to_answer], 1.0)) is True
        assert [[s.reward for s in batch] for _, batch in reader.new_results(seen)] == [[1.0]]
        assert other.complete(claims[second_to_answer], scores(claims[second_to_answer], 0.0)) is False
        assert reader.new_results(seen) == []
        clock.now += RESCAN_S
        assert reader.new_results(seen) == []
        assert other.claim("anybody", LEASE_S) is None


def test_attempts_are_capped_and_end_as_unscored(queue, store, clock, caplog):
    request_id = queue.submit(requests("a", "b"))
    for attempt in (1, 2, 3):
        assert claimed(queue, f"dies-{attempt}").attempt == attempt
        clock.now += LEASE_S + SKEW_S
    assert queue.claim("r4", LEASE_S) is None
    [(answered, batch)] = queue.new_results(set())
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
    assert [s.reward for _, batch in heir.new_results(set()) for s in batch] == [1.0]


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


def test_a_new_reader_gets_what_its_seen_lacks(queue, store, clock):
    """A reader that died after reading, before anything of it was recorded."""
    ids = []
    for name in "abc":
        ids.append(queue.submit(requests(name)))
        claim = claimed(queue, "r")
        queue.complete(claim, scores(claim, 1.0))
        clock.now += 0.01
    assert [i for i, _ in another(queue, store, clock).new_results(set())] == ids
    resumed = another(queue, store, clock)
    seen = set(ids[:1])
    assert [i for i, _ in resumed.new_results(seen)] == ids[1:]
    assert resumed.new_results(seen) == []


def test_a_poll_lists_the_markers_only(queue, clock, monkeypatch):
    seen: set[str] = set()
    queue.new_results(seen)
    listed = []
    listing = type(queue.store).list
    monkeypatch.setattr(type(queue.store), "list", lambda self, prefix: listed.append(prefix) or listing(self, prefix))
    queue.new_results(seen)
    assert listed == [f"{QUEUE}/fresh"]


def test_a_lost_marker_is_made_good_by_the_next_rescan(queue, store, clock):
    seen: set[str] = set()
    queue.new_results(seen)
    request_id = queue.submit(requests("a"))
    claim = claimed(queue, "r")
    queue.complete(claim, scores(claim, 1.0))
    store.delete(f"runs/run/{QUEUE}/fresh/{request_id}")
    assert queue.new_results(seen) == []
    clock.now += RESCAN_S
    assert [i for i, _ in queue.new_results(seen)] == [request_id]


def test_a_read_that_fails_loses_nothing(queue, store, clock, monkeypatch):
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
            queue.new_results(seen)
    assert seen == set()
    assert [i for i, _ in queue.new_results(seen)] == ids


def test_what_a_reader_remembers_does_not_grow_with_the_run(queue, store, clock):
    seen: set[str] = set()
    for number in range(20):
        queue.submit(requests(str(number)))
        claim = claimed(queue, "r")
        queue.complete(claim, scores(claim, 1.0))
        assert len(queue.new_results(seen)) == 1, "each is read once, however much is forgotten"
        clock.now += 600.0
    assert len(seen) <= 8 and len(queue._answered) <= 8
    assert another(queue, store, clock).new_results(set()) != [], "a resumed reader still gets all of them"


def test_a_result_that_came_very_late_is_read(queue, clock):
    seen: set[str] = set()
    queue.new_results(seen)
    request_id = queue.submit(requests("a"))
    clock.now += FORGET_S + 1
    claim = claimed(queue, "slow")
    queue.complete(claim, scores(claim, 1.0))
    assert [i for i, _ in queue.new_results(seen)] == [request_id]


def test_a_trajectory_that_was_submitted_twice_is_answered_once(queue):
    queue.submit(requests("a"))
    queue.submit(requests("a", "b"))
    for _ in range(2):
        claim = claimed(queue, "r")
        queue.complete(claim, scores(claim, 1.0))
    answered = [s.trajectory_id for _, batch in queue.new_results(set()) for s in batch]
    assert sorted(answered) == ["run/a", "run/b"]


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
    reader = RewardQueue(store, "run")
    seen: set[str] = set()
    answered: list[str] = []
    for thread in threads:
        while thread.is_alive():
            answered += [s.trajectory_id for _, batch in reader.new_results(seen) for s in batch]
            thread.join(timeout=0.005)
    answered += [s.trajectory_id for _, batch in reader.new_results(seen) for s in batch]
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
