"""How does a run learn of new results in the reward queue? Its one reader, which gets each of them once.

A replica puts a marker beside every result (queue.py); the reader lists the markers, reads what they name and deletes
them, so that one look costs as much as there is news.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from resources.object_store import ObjectStore
from resources.rewards.base import Score
from resources.rewards.queue import FRESH, RESULTS, facts_of, result_key, reward_key
from resources.trajectories import reward_rows
from resources.trajectories.arrow_files import decode_arrow

RESCAN_S = 30.0
"""How often a reader lists all results, in case a marker was lost with the process that had to write or read it."""
FORGET_S = 3600.0
"""A reader forgets answers to batches that were submitted longer ago than this: what still comes then comes by its
marker, and whoever no longer waits for it ignores it."""


class RewardResults:
    """There is one reader per run: it deletes the markers. Belongs to one thread; its methods block.

    ``store`` is the root store; ``clock`` gives Unix seconds.
    """

    def __init__(self, store: ObjectStore, run_id: str, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store.sub(f"runs/{run_id}")
        self._clock = clock
        self._scanned_at = float("-inf")
        self._answered: dict[tuple[str, str, str], float] = {}
        """What was answered, with the time when the batch that it came with was submitted."""

    def read_new(self, seen: set[str]) -> list[tuple[str, list[Score]]]:
        """Results that are not in ``seen``, as (id, scores); their ids are added to ``seen``, old ones taken out.

        One list call. The first call of an instance, and one every `RESCAN_S`, lists all results instead, so that a
        resumed reader gets every result that its ``seen`` lacks. A trajectory that was submitted twice is answered
        once: the first answer that this instance reads counts.
        """
        now = self._clock()
        fresh = {key.rsplit("/", 1)[1] for key in self._store.list(FRESH)}
        ids = set(fresh)
        if now - self._scanned_at >= RESCAN_S:
            listed = {key.rsplit("/", 1)[1].removesuffix(".arrow") for key in self._store.list(RESULTS)}
            is_first = self._scanned_at == float("-inf")
            ids |= {each for each in listed if is_first or not _is_old(facts_of(each)[0], now)}
            self._scanned_at = now
            self._forget(seen, now)
        # All are read before any counts as seen: a read that fails leaves everything for the next call.
        unseen = [(request_id, self._read(request_id)) for request_id in sorted(ids - seen)]
        results = []
        for request_id, scores in unseen:
            new = [score for score in scores if reward_key(score) not in self._answered]
            self._answered.update((reward_key(score), facts_of(request_id)[0]) for score in new)
            seen.add(request_id)
            if new:
                results.append((request_id, new))
        for request_id in fresh:
            self._store.delete(f"{FRESH}/{request_id}")
        return results

    def _read(self, request_id: str) -> list[Score]:
        return reward_rows.from_table(decode_arrow(self._store.get(result_key(request_id))))

    def _forget(self, seen: set[str], now: float) -> None:
        seen -= {request_id for request_id in seen if _is_old(facts_of(request_id)[0], now)}
        self._answered = {key: at for key, at in self._answered.items() if not _is_old(at, now)}


def _is_old(submitted_at: float, now: float) -> bool:
    return now - submitted_at > FORGET_S
