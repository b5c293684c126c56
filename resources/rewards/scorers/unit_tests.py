"""Does the code pass the hidden tests? They run in a sandbox, with a deadline below the scorer's own."""

from __future__ import annotations

from typing import Literal

from resources.rewards.base import Score, ScoringRequest
from resources.rewards.scorers.verdict import payload_with, verdict
from resources.sandbox.runner import run_tests

TEST_SHARE = 0.5
"""Share of the scorer's deadline that the code under test may use: the rest is for starting and ending the sandbox. So
code that loops for ever is found out by the sandbox and scored 0, and never looks like a scorer that hangs."""


class UnitTestsScorer:
    """1 when all tests pass, 0 otherwise; malformed actions cost `INVALID_ACTION_PENALTY` each.

    Code that raises, loops or crashes is the policy's own doing and scores 0; a sandbox that cannot run raises.
    Payload: ``code`` (null when the policy gave none), ``tests``, ``num_invalid_actions``.
    ``test_deadline_s`` caps the time of the tests, in seconds.
    """

    name = "unit_tests"
    version = "1"
    runs: Literal["inline", "pool"] = "pool"

    def __init__(self, test_deadline_s: float = 5.0) -> None:
        if test_deadline_s <= 0:
            raise ValueError(f"test_deadline_s is {test_deadline_s}; it must be positive")
        self.test_deadline_s = test_deadline_s

    def score(self, request: ScoringRequest) -> Score:
        """Raises ValueError when the payload lacks a key."""
        payload = payload_with(request, "code", "tests")
        passed, message = False, "no code was given"
        if payload["code"] is not None:
            deadline_s = min(self.test_deadline_s, TEST_SHARE * request.deadline_s)
            result = run_tests(payload["code"], payload["tests"], deadline_s=deadline_s)
            passed, message = result.passed, result.message
        return verdict(request, passed, "" if passed else message)
