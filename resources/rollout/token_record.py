"""The tokens of one growing trajectory: append-only, four lists of one length."""

from __future__ import annotations

import numpy as np

from resources.engines.base import Generation
from resources.failures import EngineFailure

_SEEDS, _SEED_STEP = 1 << 62, 0x9E3779B97F4A7C15
"""Sampling seeds are below the first; the second is odd, so no two sequences of a trajectory get the same one."""


class TokenRecord:
    """Grows by context (prompt, observations) and by what the policy sampled; nothing appended is ever changed. With
    slots: every waiting trajectory has one."""

    __slots__ = ("_ids", "_logprobs", "_mask", "_versions", "num_tokens", "sequence_starts")

    def __init__(self, capacity: int = 256) -> None:
        self.num_tokens = 0
        self.sequence_starts: list[int] = []
        """Positions, after 0, at which a new token sequence begins."""
        self._ids = np.empty(capacity, np.int32)
        self._mask = np.empty(capacity, np.bool_)
        self._logprobs = np.empty(capacity, np.float32)
        self._versions = np.empty(capacity, np.int32)

    def append_context(self, token_ids: np.ndarray) -> None:
        """int32 [N] that the policy did not sample."""
        start, end = self._grow(len(token_ids))
        self._ids[start:end] = token_ids
        self._mask[start:end] = False
        self._logprobs[start:end] = 0.0
        self._versions[start:end] = -1

    def append_sampled(self, generation: Generation) -> None:
        """What an engine sampled, as it sampled it. Raises EngineFailure when its lists differ in length: tokens are
        never encoded again, and nothing is padded to fit."""
        number = len(generation.token_ids)
        if not number == len(generation.logprobs) == len(generation.versions):
            raise EngineFailure(
                f"engine {generation.engine} gave {number} tokens, {len(generation.logprobs)} log-probabilities and "
                f"{len(generation.versions)} versions for {generation.trajectory_id}; they must be as many"
            )
        start, end = self._grow(number)
        self._ids[start:end] = generation.token_ids
        self._mask[start:end] = True
        self._logprobs[start:end] = generation.logprobs
        self._versions[start:end] = generation.versions

    def begin_sequence(self) -> None:
        """What follows continues nothing that is there: the history is about to be read anew, from its beginning."""
        self.sequence_starts.append(self.num_tokens)

    @property
    def sequence(self) -> np.ndarray:
        """int32 [T]: the tokens that the next generation continues."""
        return self.token_ids[self.sequence_starts[-1] if self.sequence_starts else 0 :]

    def sampling_seed(self, seed: int) -> int:
        """Of the sequence under way. Engines draw noise by (seed, position), and every sequence counts its positions
        from 0: with one seed they would draw alike."""
        number = len(self.sequence_starts)
        return (seed + number * _SEED_STEP) % _SEEDS if number else seed

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [T]; a view that stays valid, since what it shows is never written again."""
        return self._ids[: self.num_tokens]

    @property
    def loss_mask(self) -> np.ndarray:
        return self._mask[: self.num_tokens]

    @property
    def logprobs(self) -> np.ndarray:
        return self._logprobs[: self.num_tokens]

    @property
    def versions(self) -> np.ndarray:
        return self._versions[: self.num_tokens]

    def _grow(self, number: int) -> tuple[int, int]:
        start, self.num_tokens = self.num_tokens, self.num_tokens + number
        if self.num_tokens > len(self._ids):
            capacity = max(self.num_tokens, 2 * len(self._ids))
            for name in ("_ids", "_mask", "_logprobs", "_versions"):
                old = getattr(self, name)
                grown = np.empty(capacity, old.dtype)
                grown[:start] = old[:start]
                setattr(self, name, grown)
        return start, self.num_tokens
