"""When are a version's bytes at a simulated engine? Transfers follow each other on one link."""

from __future__ import annotations

import asyncio
from typing import Protocol

from resources.clock import Clock
from resources.failures import EngineFailure, RollartError


class VersionSource(Protocol):
    """Where a simulated engine finds published versions (`resources.weights.store.WeightStore` is one)."""

    def policy_directory(self, version: int) -> object:
        """Path of a directory with a version's configuration and tokenizer. Blocks; raises for one not published."""
        ...


class WeightLink:
    """The link of one engine. Times are simulated seconds."""

    def __init__(self, engine: str, source: VersionSource, clock: Clock, transfer_s: float) -> None:
        """``transfer_s``: what one version takes."""
        self._engine, self._source, self._clock = engine, source, clock
        self._transfer_s = transfer_s
        self._transfers: dict[int, tuple[float, float]] = {}
        """When the transfer of each fetched version began, and when its last byte is there."""

    async def fetch(self, version: int) -> float:
        """Returns when all of the version's bytes are there: the time at which their transfer began.

        Raises EngineFailure when the version cannot be fetched.
        """
        if version not in self._transfers:
            try:
                await asyncio.to_thread(self._source.policy_directory, version)
            except (ValueError, KeyError, OSError, RollartError) as error:
                raise EngineFailure(f"engine {self._engine}: version {version} cannot be fetched: {error}") from error
        if version not in self._transfers:
            now = self._clock.now()
            begins = max([now, *(arrived for _, arrived in self._transfers.values())])
            self._transfers[version] = begins, begins + self._transfer_s
        began, arrived = self._transfers[version]
        while (left_s := arrived - self._clock.now()) > 0:
            await self._clock.sleep(left_s)
        return began

    def loaded(self, version: int) -> None:
        """Older versions, and this one, are not asked for again."""
        self._transfers = {other: times for other, times in self._transfers.items() if other > version}

    def hidden_s(self, began_at: float, load_started_at: float) -> float:
        """The part of a transfer that lay before the load, and was hidden behind serving."""
        return min(self._transfer_s, max(0.0, load_started_at - began_at))
