"""Does the answer equal the expected one? As numbers when both are numbers, as text otherwise."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from resources.rewards.base import Score, ScoringRequest
from resources.rewards.scorers.verdict import payload_with, verdict

# No exponents: 1e999999999 is nobody's answer, and arithmetic on it never ends.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)", re.ASCII)


class ExactAnswerScorer:
    """1 for the right answer, 0 for a wrong one or none; malformed actions cost `INVALID_ACTION_PENALTY` each.

    Payload: ``answer`` (text, a number, or null when the policy gave none), ``expected`` (text or a number), and
    ``num_invalid_actions``. ``ignore_case`` compares texts without regard to case.
    """

    name = "exact_answer"
    version = "1"
    runs: Literal["inline", "pool"] = "pool"

    def __init__(self, ignore_case: bool = False) -> None:
        self.ignore_case = ignore_case

    def score(self, request: ScoringRequest) -> Score:
        """Raises ValueError when the payload lacks a key."""
        payload = payload_with(request, "answer", "expected")
        success = payload["answer"] is not None and self._canonical(payload["answer"]) == self._canonical(
            payload["expected"]
        )
        return verdict(request, success)

    def _canonical(self, value: object) -> Decimal | str:
        text = " ".join(str(value).split())
        if _NUMBER.fullmatch(text):
            return Decimal(text)
        return text.casefold() if self.ignore_case else text
