"""Batches of scoring requests that are claimed and answered by hand, in a time that is set by hand."""

from __future__ import annotations

from resources.rewards.base import Score, ScoringRequest
from resources.rewards.leases import Claim
from resources.rewards.queue import RewardQueue

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


def claimed(queue: RewardQueue, owner: str) -> Claim:
    claim = queue.claim(owner, LEASE_S)
    assert claim is not None
    return claim
