from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from resources.failures import FailureClass, RewardFailure
from resources.rewards import scorer_pool
from resources.rewards.base import Score, ScoringRequest
from resources.rewards.scorer_pool import ScorerPool
from resources.rewards.scorer_process import ScorerProcess
from resources.rewards.scorers import resolve_scorer

MODULE = "tests.unit.misbehaving_scorers"
PATIENCE_S = 30.0


def request(scorer: str, payload: dict | None = None, *, name: str = "t", deadline_s: float = 20.0) -> ScoringRequest:
    path = scorer if ":" in scorer or scorer == "exact_answer" else f"{MODULE}:{scorer}"
    return ScoringRequest(f"run/{name}", "family", path, "1", payload or {}, deadline_s)


def collect(pool: ScorerPool, num: int) -> dict[object, Score]:
    scores: dict[object, Score] = {}
    end = time.monotonic() + PATIENCE_S
    while len(scores) < num:
        assert time.monotonic() < end, f"only {list(scores)} came back"
        scores |= dict(pool.wait(1.0))
    return scores


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while is_alive(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def pool():
    with ScorerPool(1) as pool:
        yield pool


def test_scores_come_back_with_their_tickets(pool):
    for ticket in range(5):
        pool.submit(ticket, request("EchoScorer", {"reward": float(ticket)}, name=str(ticket)), {})
    scores = collect(pool, 5)
    assert [scores[i].reward for i in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [scores[i].trajectory_id for i in range(5)] == [f"run/{i}" for i in range(5)]
    assert {s.components["pid"] for s in scores.values()} == {float(pool.pids()[0])}


def test_a_replica_with_other_arguments_or_code_refuses(pool):
    pool.submit("t", request("EchoScorer", {"reward": 1.0}), {"factor": 2.0})
    score = collect(pool, 1)["t"]
    asked_for = resolve_scorer(f"{MODULE}:EchoScorer", {"factor": 2.0}).version
    assert score.failure is FailureClass.REWARD
    assert f"this replica has '{asked_for}'" in score.failure_message


@pytest.mark.parametrize("scorer", ["LoopingScorer", "LockHoldingScorer"])
def test_a_scorer_that_loops_is_killed_at_its_deadline_and_the_slot_is_back(pool, scorer):
    """S13."""
    [before] = pool.pids()
    pool.submit("loops", request(scorer, deadline_s=0.3), {})
    pool.submit("next", request("exact_answer", {"answer": "7", "expected": "7"}), {})
    scores = collect(pool, 2)
    assert (scores["loops"].reward, scores["loops"].failure) == (None, FailureClass.REWARD)
    assert "no answer within the deadline of 0.3 s" in scores["loops"].failure_message
    assert scores["next"].reward == 1.0
    assert pool.pids() != [before]
    assert not is_alive(before)


def test_a_scorer_runs_in_the_main_thread(pool):
    """S13: a scorer that guards itself with SIGALRM (math-verify) gives the right score."""
    pool.submit("t", request("AlarmScorer"), {})
    assert collect(pool, 1)["t"].reward == 0.5


def test_what_a_scorer_started_is_killed_with_it(pool, tmp_path):
    file = tmp_path / "pid"
    pool.submit("t", request("ForkingScorer", {"file": str(file)}, deadline_s=2.0), {})
    assert collect(pool, 1)["t"].failure is FailureClass.REWARD
    wait_until_gone(int(file.read_text()))


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("RaisingScorer", "the scorer raised KeyError: 'no such answer'"),
        ("ExitingScorer", "the scorer's process ended with exit code 7"),
        ("NotANumberScorer", "gave reward nan; it must be finite"),
        ("WrongTrajectoryScorer", "answers for trajectory 'another'"),
        ("NoSuchScorer", "has no class 'NoSuchScorer'"),
    ],
)
def test_a_scorer_that_fails_leaves_its_trajectory_unscored(pool, scorer, message):
    pool.submit("t", request(scorer), {})
    score = collect(pool, 1)["t"]
    assert (score.reward, score.failure) == (None, FailureClass.REWARD)
    assert message in score.failure_message


def test_a_payload_larger_than_a_pipe_gets_through(pool):
    text = "x" * 2_000_000
    pool.submit("t", request("exact_answer", {"answer": text, "expected": text}), {})
    assert collect(pool, 1)["t"].success is True


def test_an_idle_process_that_dies_is_replaced(pool):
    [pid] = pool.pids()
    os.kill(pid, 9)
    pool.submit("t", request("exact_answer", {"answer": "7", "expected": "8"}), {})
    score = collect(pool, 1)["t"]
    # It died before or while it was given the request, whichever was noticed first.
    assert score.reward == 0.0 or score.failure is FailureClass.REWARD
    assert pool.pids() != [pid]


def test_several_processes_score_at_once_and_end_with_the_pool():
    with ScorerPool(2) as pool:
        for ticket in ("a", "b"):
            pool.submit(ticket, request("LoopingScorer", name=ticket, deadline_s=0.5), {})
        assert {s.failure for s in collect(pool, 2).values()} == {FailureClass.REWARD}
        pids = pool.pids()
        assert len(set(pids)) == 2
    for pid in pids:
        assert not is_alive(pid)


def test_processes_that_cannot_start_are_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setattr(scorer_pool, "ScorerProcess", DeafProcess)
    with ScorerPool(1, start_timeout_s=0.01) as pool:
        pool.submit("t", request("exact_answer"), {})
        with pytest.raises(RewardFailure, match=r"3 scorer processes in a row did not start within 0\.01 s"):
            for _ in range(10):
                pool.wait(0.05)


class DeafProcess(ScorerProcess):
    """Never says that it is ready."""

    def read(self) -> None:
        return None


REPLICA_THAT_IS_KILLED = f"""
import sys
from resources.rewards.base import ScoringRequest
from resources.rewards.scorer_pool import ScorerPool
pool = ScorerPool(1)
while not pool.wait(0.01) and not pool._workers[0].ready:
    pass
pool.submit("t", ScoringRequest("run/t", "f", "{MODULE}:LockHoldingScorer", "1", {{}}, 60.0), {{}})
pool.wait(0.01)
print(pool.pids()[0], flush=True)
pool.wait(60.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent, whatever it does")
def test_a_scorer_that_loops_does_not_outlive_a_killed_replica():
    replica = subprocess.Popen([sys.executable, "-c", REPLICA_THAT_IS_KILLED], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    with replica.stdout:
        scorer = int(replica.stdout.readline())
        assert is_alive(scorer)
        replica.kill()
        replica.wait(timeout=PATIENCE_S)
    wait_until_gone(scorer)
