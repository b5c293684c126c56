"""Who holds which micro-batch, and until when: claims as objects, leases by the claimants' own clocks.

A claim is the object ``rewards/queue/claims/<id>.<attempt>``; it is created atomically, so each attempt has one holder.
It says itself when it expires (Unix seconds): no clock or modification time of the store is used. The clocks of two
replicas may differ by ``clock_skew_s``: in everybody else's eyes a lease lasts that much longer. A larger skew can only
cause a batch to be scored twice; which result counts is decided by an atomic create, never by a clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from resources.object_store import ObjectStore
from resources.rewards.base import ScoringRequest

CLAIMS = "rewards/queue/claims"


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to score one micro-batch until ``expires_at`` (Unix seconds, by the claimant's clock)."""

    request_id: str
    attempt: int
    """1 for the first claimant of the batch."""
    owner: str
    expires_at: float
    requests: tuple[ScoringRequest, ...] = ()


class Leases:
    """The claims of one run's queue, as one process sees them. ``store`` is the run's store."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float], clock_skew_s: float) -> None:
        self._store = store
        self._clock = clock
        self._clock_skew_s = clock_skew_s
        self._expiries: dict[tuple[str, int], float] = {}  # by (id, attempt), as last read

    def take(self, request_id: str, attempt: int, owner: str, lease_s: float) -> Claim | None:
        """The claim, without its requests; None when another replica has this attempt."""
        now = self._clock()
        claim = Claim(request_id, attempt, owner, now + lease_s)
        return claim if self._store.create(_claim_key(request_id, attempt), _encode(claim, now)) else None

    def renew(self, claim: Claim, lease_s: float) -> Claim:
        """Extend a lease that has not expired; an expired one is left alone (somebody else may hold the batch)."""
        now = self._clock()
        if now >= claim.expires_at:
            return claim
        renewed = replace(claim, expires_at=now + lease_s)
        self._store.put(_claim_key(claim.request_id, claim.attempt), _encode(renewed, now))
        return renewed

    def drop(self, request_id: str, attempt: int) -> None:
        self._store.delete(_claim_key(request_id, attempt))

    def is_live(self, request_id: str, attempt: int) -> bool:
        """Whether somebody holds this attempt. One that looks expired is read again: it may have been renewed."""
        horizon = self._clock() - self._clock_skew_s
        if self._expiries.get((request_id, attempt), float("-inf")) > horizon:
            return True
        try:
            expires_at = float(self._store.get_json(_claim_key(request_id, attempt))["expires_at"])
        except KeyError:
            return False  # finished or given back since it was listed: trying to take it finds out
        self._expiries[request_id, attempt] = expires_at
        return expires_at > horizon

    def keep_only(self, listed: dict[str, int]) -> None:
        """Forget what was read of claims that are gone. ``listed``: highest attempt by id."""
        self._expiries = {claim: expiry for claim, expiry in self._expiries.items() if listed.get(claim[0]) == claim[1]}


def _claim_key(request_id: str, attempt: int) -> str:
    return f"{CLAIMS}/{request_id}.{attempt}"


def _encode(claim: Claim, now: float) -> bytes:
    return json.dumps({"owner": claim.owner, "claimed_at": now, "expires_at": claim.expires_at}).encode()
