"""Requests of a simulated engine: how far is each, and when does the next of those that decode end?"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from resources.engines.base import GenerateRequest
from resources.engines.simulated_answers import AnswerPlan


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on its way through the engine. Times are simulated seconds."""

    request: GenerateRequest
    plan: AnswerPlan
    submitted_at: float
    admitted_at: float = 0.0
    first_token_at: float | None = None
    cached_tokens: int = 0
    kv_length: int = 0
    """While it is prefilled: tokens of the history whose KV is there."""
    outdated: int = 0
    """Tokens at the beginning of the history whose KV was there under an older version."""
    num_sampled: int = 0
    """As of ``at_step``; while it decodes, one more with every step since then."""
    at_step: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens sampled before it): where the tokens of older versions end."""
    decoding: bool = False
    ended: bool = False
    released: bool = False

    def __lt__(self, other: SimulatedRequest) -> bool:
        return self.submitted_at < other.submitted_at

    def versions(self, newest: int) -> np.ndarray:
        """int32 [num_sampled]: under which version each token was sampled."""
        versions = np.full(self.num_sampled, newest, dtype=np.int32)
        for version, until in reversed(self.spans):
            versions[:until] = version
        return versions

    def most_tokens(self, context_length: int) -> int:
        """KV tokens that it may come to need; the engine does not know how long its answer will be."""
        return min(context_length, len(self.request.token_ids) + self.request.sampling.max_new_tokens)


class DecodingRequests:
    """Requests that get a token with every step. No work per token: what they have is counted from the step at which
    each joined."""

    def __init__(self) -> None:
        self.step = 0
        """Steps that were taken so far."""
        self.kv_tokens = 0
        """KV tokens that a decode step reads."""
        self._num = 0
        self._ends: list[tuple[int, SimulatedRequest]] = []
        """Heap of (step after which it has all its tokens, decoding request); ended ones may still be in it."""

    def __len__(self) -> int:
        return self._num

    def start(self, one: SimulatedRequest) -> None:
        """Its history is complete as of the step just taken, which sampled its next token as well."""
        one.num_sampled += 1
        one.at_step = self.step
        one.decoding = True
        one.outdated = 0
        self._num += 1
        self.kv_tokens += self.length(one)
        heapq.heappush(self._ends, (self.step + one.plan.num_tokens - one.num_sampled, one))

    def stop(self, one: SimulatedRequest) -> None:
        self.kv_tokens -= self.length(one)
        self._num -= 1
        one.num_sampled = self._sampled(one)
        one.decoding = False

    def take(self, num_steps: int) -> None:
        """A token more for each, ``num_steps`` times."""
        self.step += num_steps
        self.kv_tokens += num_steps * self._num

    def steps_to_next_end(self) -> int:
        while self._ends[0][1].ended or not self._ends[0][1].decoding:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.step

    def take_ended(self) -> Iterator[SimulatedRequest]:
        """Those that have all their tokens, once each; they decode until they are stopped."""
        while self._ends and (self._ends[0][0] <= self.step or self._ends[0][1].ended):
            _, one = heapq.heappop(self._ends)
            if one.decoding and not one.ended and self._sampled(one) >= one.plan.num_tokens:
                yield one

    def length(self, one: SimulatedRequest) -> int:
        """Tokens of a request's history now, whether it decodes or not."""
        return len(one.request.token_ids) + self._sampled(one)

    def _sampled(self, one: SimulatedRequest) -> int:
        return one.num_sampled + (self.step - one.at_step if one.decoding else 0)
