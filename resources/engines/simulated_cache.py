"""Which KV does a simulated engine hold between turns? Histories that no request runs on, oldest use first out.

What is kept of a history is its length and a fingerprint: an engine that serves thousands of trajectories holds no
copies of their tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from resources.engines.config import PrefixCache

_NUM_OPENINGS = 4096
"""Openings whose KV siblings share, at most."""
_NUM_HISTORIES = 65536
"""Histories that are remembered, at most, whether their KV is valid or not."""


@dataclass(slots=True)
class _Kept:
    num_tokens: int
    fingerprint: int
    valid: bool = True
    """False: of an older version, to be computed again."""


@dataclass(frozen=True, slots=True)
class Reuse:
    cached: int
    """Tokens at the beginning of a history whose KV is there."""
    outdated: int
    """Tokens whose KV was there under an older version."""


class PrefixKV:
    def __init__(self, mode: PrefixCache) -> None:
        self._mode = mode
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._openings: OrderedDict[int, None] = OrderedDict()
        self.num_tokens = 0
        """Whose KV is kept in all."""

    def take(self, trajectory_id: str, token_ids: np.ndarray) -> Reuse:
        """The history is about to be computed: what can it start from? It is no longer kept."""
        kept = self._kept.pop(trajectory_id, None)
        if kept is not None:
            self.num_tokens -= kept.num_tokens if kept.valid else 0
            # The last token is always computed: its logits are what is sampled from.
            if kept.num_tokens < len(token_ids) and _fingerprint(token_ids[: kept.num_tokens]) == kept.fingerprint:
                return Reuse(kept.num_tokens, 0) if kept.valid else Reuse(0, kept.num_tokens)
        if self._mode != "shared":
            return Reuse(0, 0)
        opening = _fingerprint(token_ids)
        if opening in self._openings:
            self._openings.move_to_end(opening)
            return Reuse(len(token_ids) - 1, 0)
        self._openings[opening] = None
        if len(self._openings) > _NUM_OPENINGS:
            self._openings.popitem(last=False)
        return Reuse(0, 0)

    def keep(self, trajectory_id: str, history: np.ndarray, sampled: np.ndarray) -> None:
        """Keep the KV of a history and what was sampled behind it for the trajectory's next turn."""
        if self._mode == "off":
            return
        self.release(trajectory_id)
        num_tokens = len(history) + len(sampled)
        self._kept[trajectory_id] = _Kept(num_tokens, hash(history.tobytes() + sampled.tobytes()))
        self.num_tokens += num_tokens
        if len(self._kept) > _NUM_HISTORIES:
            self.release(next(iter(self._kept)))

    def release(self, trajectory_id: str) -> None:
        kept = self._kept.pop(trajectory_id, None)
        if kept is not None and kept.valid:
            self.num_tokens -= kept.num_tokens

    def make_room(self, num_tokens: int) -> None:
        """Drop the histories not used for longest until at most so many tokens are kept."""
        while self.num_tokens > num_tokens:
            self.release(next(iter(self._kept)))

    def outdate(self) -> int:
        """The version moved: no KV is valid any more. Returns the tokens that were lost."""
        lost, self.num_tokens = self.num_tokens, 0
        for kept in self._kept.values():
            kept.valid = False
        self._openings.clear()
        return lost


def _fingerprint(token_ids: np.ndarray) -> int:
    return hash(token_ids.tobytes())
