"""Where do the scores of the reward pool come from? The run's reward queue, read in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from resources.failures import RollartError
from resources.rewards.base import Score

LONGEST_PAUSE_S = 5.0


def open_reward_results(store_url: str, run_id: str) -> Callable[[], list[Score]]:
    """A function that returns the scores which arrived since its last call; it blocks, and belongs to one thread."""
    from resources.object_store import ObjectStore
    from resources.rewards.results import RewardResults

    results = RewardResults(ObjectStore.open(store_url), run_id)
    seen: set[str] = set()

    def read() -> list[Score]:
        return [score for _, scores in results.read_new(seen) for score in scores]

    return read


class ResultReader:
    """Reads in one thread of its own; an object store that fails for a while is reported and asked again."""

    def __init__(self, read: Callable[[], list[Score]], log: Callable[[str], None]) -> None:
        self._read = read
        self._log = log
        self._num_failures = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-results")

    async def read(self) -> list[Score]:
        """New scores; none when the store could not be read (then after a pause that grows with each failure)."""
        try:
            scores = await asyncio.get_running_loop().run_in_executor(self._thread, self._read)
        except (OSError, RollartError, KeyError) as error:
            self._num_failures += 1
            self._log(f"reward results cannot be read ({type(error).__name__}: {error}); asked again")
            await asyncio.sleep(min(LONGEST_PAUSE_S, 0.1 * 2**self._num_failures))
            return []
        self._num_failures = 0
        return scores

    def close(self) -> None:
        self._thread.shutdown(wait=False)
