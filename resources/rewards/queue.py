"""The reward queue: scoring requests wait in the object store, any replica may take them, each is answered once.

    rewards/queue/requests/<id>.arrow     a micro-batch that has no result yet
    rewards/queue/claims/<id>.<attempt>   who scores it, and until when (the highest attempt counts)
    rewards/queue/fresh/<id>              a result that the run has not read yet
    rewards/queue/rejected/<id>.arrow     a request file that nobody can read (a bug, kept for inspection)
    rewards/results/<id>.arrow            the result, kept for good

Everything under ``queue/`` goes away when its batch is done, so that one look at the queue lists what is unfinished and
never the history. The order of writes carries the guarantees: a claim is an atomic create, a result is an atomic create
(a late duplicate loses and is ignored), then the ``fresh`` marker is put, then the request and last its claims are
deleted. A replica that dies in between leaves the request, whose next claimant finds the result and ends the clean-up.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from resources.failures import FailureClass
from resources.object_store import ObjectStore
from resources.rewards import request_rows
from resources.rewards.base import Score, ScoringRequest
from resources.rewards.leases import Claim, Leases
from resources.trajectories import reward_rows
from resources.trajectories.arrow_files import decode_arrow, encode_arrow

logger = logging.getLogger(__name__)

QUEUE = "rewards/queue"
FRESH = f"{QUEUE}/fresh"
RESULTS = "rewards/results"
LISTING_MAX_AGE_S = 1.0
"""Claims are taken from one listing for this long: a deep backlog is not listed anew for every claim."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in the queue. Counts are in scoring requests unless they say batches."""

    num_unclaimed: int = 0
    num_in_flight: int = 0
    num_unclaimed_batches: int = 0
    num_in_flight_batches: int = 0
    oldest_age_s: float = 0.0
    """Seconds since the oldest unclaimed batch was submitted; 0 when there is none."""

    @property
    def num_unfinished(self) -> int:
        return self.num_unclaimed + self.num_in_flight


class RewardQueue:
    """One run's queue. Environment workers submit, replicas claim and complete; results are read in results.py.

    An instance is cheap and belongs to one thread; its methods block. ``store`` is the root store; ``clock`` gives Unix
    seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        *,
        max_attempts: int = 3,
        clock_skew_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run_id = run_id
        self.store = store.sub(f"runs/{run_id}")
        self._max_attempts = max_attempts
        self._clock = clock
        self._leases = Leases(self.store, clock, clock_skew_s)
        self._attempts: dict[str, int] = {}  # as last listed
        self._candidates: deque[str] = deque()  # listed requests that this instance has not looked at
        self._listed_at = float("-inf")

    # --- environment workers ---

    def submit(self, requests: Sequence[ScoringRequest]) -> str:
        """Append one micro-batch; returns its id. Raises ValueError when it is empty or a payload is not JSON."""
        if not requests:
            raise ValueError("a micro-batch of no scoring requests was submitted; submit at least one")
        request_id = f"{int(self._clock() * 1000):013d}-{uuid.uuid4().hex[:8]}-{len(requests):04d}"
        created = self.store.create(_request_key(request_id), encode_arrow(request_rows.to_table(requests)))
        assert created, f"two micro-batches drew the id {request_id}"
        return request_id

    # --- replicas ---

    def claim(self, owner: str, lease_s: float) -> Claim | None:
        """Take the oldest micro-batch that nobody holds, or whose lease has expired; None when there is none.

        A batch whose last permitted attempt has expired is answered here with unscored results instead.
        """
        if not self._candidates or self._clock() - self._listed_at > LISTING_MAX_AGE_S:
            requests, self._attempts = self._look()
            self._candidates = deque(requests)
            self._listed_at = self._clock()
            self._drop_orphan_claims(set(requests))
        while self._candidates:
            request_id = self._candidates.popleft()
            attempts = self._attempts.get(request_id, 0)
            if attempts and self._leases.is_live(request_id, attempts):
                continue
            if attempts >= self._max_attempts:
                self._give_up(request_id, attempts)
                continue
            claim = self._take(request_id, attempts + 1, owner, lease_s)
            if claim is not None:
                return claim
        return None

    def renew(self, claim: Claim, lease_s: float) -> Claim:
        """Extend a lease that has not expired; an expired one is left alone (somebody else may hold the batch)."""
        return self._leases.renew(claim, lease_s)

    def release(self, claim: Claim) -> None:
        """Give a batch back unscored. It does not count as an attempt."""
        self._leases.drop(claim.request_id, claim.attempt)

    def complete(self, claim: Claim, scores: Sequence[Score]) -> bool:
        """Answer a batch, one score per request in order. False when it was answered already: ours is then ignored.

        Raises ValueError when the scores do not match the requests.
        """
        asked = [reward_key(r) for r in claim.requests]
        given = [reward_key(s) for s in scores]
        if asked != given:
            raise ValueError(f"batch {claim.request_id} asks for {asked}, but is answered for {given}")
        table = reward_rows.to_table(scores, families=[r.family for r in claim.requests], replica=claim.owner)
        first = self.store.create(result_key(claim.request_id), encode_arrow(table))
        self._clean_up(claim.request_id, claim.attempt)
        return first

    # --- the autoscaler ---

    def backlog(self) -> Backlog:
        """What is unfinished now: one list call, and one read per claim that was not seen before."""
        now = self._clock()
        requests, attempts = self._look()
        num_requests = {True: 0, False: 0}
        num_batches = {True: 0, False: 0}
        oldest_age_s = 0.0
        for request_id in requests:
            held = request_id in attempts and self._leases.is_live(request_id, attempts[request_id])
            submitted_at, num = facts_of(request_id)
            num_requests[held] += num
            num_batches[held] += 1
            if not held:
                oldest_age_s = max(oldest_age_s, now - submitted_at)
        return Backlog(
            num_unclaimed=num_requests[False],
            num_in_flight=num_requests[True],
            num_unclaimed_batches=num_batches[False],
            num_in_flight_batches=num_batches[True],
            oldest_age_s=oldest_age_s,
        )

    # --- inside ---

    def _look(self) -> tuple[list[str], dict[str, int]]:
        """One list call: ids of the unfinished batches, oldest first, and the highest attempt of each claimed id."""
        requests: list[str] = []
        attempts: dict[str, int] = {}
        for key in self.store.list(QUEUE):
            kind, _, name = key.removeprefix(f"{QUEUE}/").partition("/")
            if kind == "requests":
                requests.append(name.removesuffix(".arrow"))
            elif kind == "claims":
                request_id, _, attempt = name.rpartition(".")
                attempts[request_id] = max(int(attempt), attempts.get(request_id, 0))
        self._leases.keep_only(attempts)
        return requests, attempts

    def _take(self, request_id: str, attempt: int, owner: str, lease_s: float) -> Claim | None:
        claim = self._leases.take(request_id, attempt, owner, lease_s)
        if claim is None:
            return None  # another replica was faster
        if attempt > 1 and self.store.exists(result_key(request_id)):
            self._clean_up(request_id, attempt)
            return None
        requests = self._read_requests(request_id)
        if requests is None:
            self._leases.drop(request_id, attempt)
            return None
        return replace(claim, requests=requests)

    def _read_requests(self, request_id: str) -> tuple[ScoringRequest, ...] | None:
        """None when the file is gone (finished since the listing) or unreadable (set aside)."""
        try:
            data = self.store.get(_request_key(request_id))
        except KeyError:
            return None
        try:
            return tuple(request_rows.from_table(decode_arrow(data)))
        except (pa.ArrowInvalid, ValueError):
            logger.exception("reward request %s cannot be read; it is set aside under %s/rejected", request_id, QUEUE)
            self.store.put(f"{QUEUE}/rejected/{request_id}.arrow", data)
            self.store.delete(_request_key(request_id))
            return None

    def _give_up(self, request_id: str, attempts: int) -> None:
        requests = self._read_requests(request_id)
        if requests is None:
            return
        message = f"no replica answered within {attempts} attempts: each died, or lost its lease"
        logger.error("reward batch %s: %s; its %d trajectories stay unscored", request_id, message, len(requests))
        claim = Claim(request_id, attempts, "given-up", 0.0, requests)
        self.complete(claim, [unscored(request, message) for request in requests])

    def _clean_up(self, request_id: str, attempt: int) -> None:
        self.store.put(f"{FRESH}/{request_id}", b"")
        self.store.delete(_request_key(request_id))
        for number in range(1, attempt + 1):
            self._leases.drop(request_id, number)

    def _drop_orphan_claims(self, requests: set[str]) -> None:
        """Claims that outlived their request: of a replica that died between claim and read, or renewed too late."""
        for request_id, attempt in self._attempts.items():
            if request_id not in requests and not self._leases.is_live(request_id, attempt):
                self._leases.drop(request_id, attempt)


def unscored(request: ScoringRequest, message: str, duration_s: float = 0.0) -> Score:
    """The answer to a request that could not be judged: a reward failure, never a reward of 0."""
    return Score(
        trajectory_id=request.trajectory_id,
        scorer=request.scorer,
        scorer_version=request.scorer_version,
        reward=None,
        failure=FailureClass.REWARD,
        failure_message=message,
        duration_s=duration_s,
    )


def facts_of(request_id: str) -> tuple[float, int]:
    """When a batch was submitted (Unix seconds) and how many requests it holds, as its id says."""
    milliseconds, _, num_requests = request_id.split("-")
    return int(milliseconds) / 1000, int(num_requests)


def reward_key(item: ScoringRequest | Score) -> tuple[str, str, str]:
    """What is answered once."""
    return item.trajectory_id, item.scorer, item.scorer_version


def _request_key(request_id: str) -> str:
    return f"{QUEUE}/requests/{request_id}.arrow"


def result_key(request_id: str) -> str:
    return f"{RESULTS}/{request_id}.arrow"
