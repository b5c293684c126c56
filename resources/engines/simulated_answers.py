"""What does a simulated engine sample? Tokens that depend on (seed, position) only, in answers of scripted length.

A request whose history ends in the beginning of such an answer (another engine was lost over it) goes on with it: the
same tokens, and as many as were left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from resources.engines.base import FinishReason, GenerateRequest
from resources.engines.noise import uniform_at, uniform_noise
from resources.engines.simulated_config import ScriptedAnswers

_LENGTHS = 0x5DEECE66D
"""Makes the draws of lengths other than those of tokens."""
_LOOK_BACK = 4096
"""Tokens of an unfinished answer that are recognised, at most."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How a request will end, known when it arrives."""

    num_tokens: int
    finish_reason: FinishReason


class AnswerScript:
    """Answers for one vocabulary."""

    def __init__(self, config: ScriptedAnswers, vocab_size: int) -> None:
        """Raises ValueError for token ids beyond the vocabulary."""
        self._config = config
        self._first, beyond = config.token_ids or (vocab_size // 4, vocab_size - vocab_size // 4)
        if beyond > vocab_size:
            raise ValueError(
                f"engine.simulated.answers.token_ids is {[self._first, beyond]}, but the policy has {vocab_size} "
                "tokens; lower the end of the range"
            )
        self._num_ids = beyond - self._first
        self.logprob = -math.log(self._num_ids)
        """Behaviour log-probability of every token: they are drawn evenly."""

    def plan(self, request: GenerateRequest, context_length: int) -> AnswerPlan:
        """Where the answer ends; the history must be shorter than the context."""
        sampling, history = request.sampling, request.token_ids
        room = context_length - len(history)
        limit = min(sampling.max_new_tokens, room)
        if sampling.stop_token_ids:
            begun = self._num_begun(request)
            wanted = max(1, self._length(request, len(history) - begun) - begun)
            if wanted <= limit:
                return AnswerPlan(wanted, "stop")
        return AnswerPlan(limit, "length" if limit == sampling.max_new_tokens else "context")

    def tokens(self, request: GenerateRequest, plan: AnswerPlan, num_tokens: int) -> np.ndarray:
        """int32 [num_tokens]: the first tokens of the answer."""
        start = len(request.token_ids)
        token_ids = self._drawn(request, start, start + num_tokens)
        if plan.finish_reason == "stop" and num_tokens == plan.num_tokens:
            token_ids[-1] = request.sampling.stop_token_ids[0]
        return token_ids

    def _length(self, request: GenerateRequest, start: int) -> int:
        config, mean = self._config, self._config.mean_tokens
        if config.length == "fixed":
            return round(mean)
        share = uniform_at(_seed(request) ^ _LENGTHS, start)
        match config.length:
            case "uniform":
                return 1 + int(share * (2 * mean - 1))
            case "geometric":
                return 1 if mean == 1 else 1 + int(math.log1p(-share) / math.log1p(-1 / mean))
            case "lognormal":
                deviation = NormalDist().inv_cdf(max(share, 2**-53))
                return max(1, round(mean * math.exp(config.sigma * deviation - config.sigma**2 / 2)))

    def _drawn(self, request: GenerateRequest, start: int, end: int) -> np.ndarray:
        seeds = np.full(end - start, _seed(request), np.uint64)
        noise = uniform_noise(seeds, np.arange(start, end, dtype=np.uint64))
        token_ids = (self._first + noise * self._num_ids).astype(np.int32)
        stops = request.sampling.stop_token_ids
        for stop in stops:
            if self._first <= stop < self._first + self._num_ids:
                token_ids[token_ids == stop] = self._substitute(stops)
        return token_ids

    def _drawn_at(self, request: GenerateRequest, position: int) -> int:
        """One token of `_drawn`."""
        token_id = int(self._first + uniform_at(_seed(request), position) * self._num_ids)
        stops = request.sampling.stop_token_ids
        return self._substitute(stops) if token_id in stops else token_id

    def _substitute(self, stops: tuple[int, ...]) -> int:
        """What is sampled instead of a stop token in the middle of an answer."""
        return next(i for i in range(self._first, self._first + len(stops) + 1) if i not in stops)

    def _num_begun(self, request: GenerateRequest) -> int:
        """Tokens at the end of the history that are an answer of this script, not ended yet."""
        history = request.token_ids
        end = len(history)
        if history[-1] != self._drawn_at(request, end - 1):
            return 0
        start = max(0, end - _LOOK_BACK)
        differs = history[start:] != self._drawn(request, start, end)
        return int(differs[::-1].argmax()) if differs.any() else end - start


def _seed(request: GenerateRequest) -> int:
    return 0 if request.sampling.greedy else request.seed & 0xFFFF_FFFF_FFFF_FFFF
