"""Which engines and rollout workers are sick although their processes live?

An engine that answers `stats` may still generate nothing: one that rollout workers complain about is *probed*, and a
token within the deadline decides. A rollout worker says itself when it is worn out (too many environment calls were
abandoned) or when its event loop is blocked; one that does not answer at all is restarted after two rounds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.pools.actors import ActorHandle, call
from resources.pools.registry import RunActors
from resources.recovery.config import RecoveryConfig

MISSES = 2
"""Rounds in a row."""


class HealthRound:
    """Asks everybody at once; remembers what it saw in the round before."""

    def __init__(self, config: RecoveryConfig, *, call: Callable[..., Awaitable[Any]] = call) -> None:
        self._config, self._call = config, call
        self._misses: Counter[str] = Counter()
        """Rounds in a row without an answer, by key of the actor."""
        self._behind: Counter[str] = Counter()
        """Rounds in a row in which an engine served an older version than the gate's."""

    def sick(self, actors: RunActors) -> list[tuple[ActorHandle, str]]:
        """Actors whose process must be restarted, and why. Blocks; ends at the deadlines of the configuration."""
        return asyncio.run(self._round(actors))

    async def _round(self, actors: RunActors) -> list[tuple[ActorHandle, str]]:
        engines = [each for members in actors.engines.values() for each in members]
        found, serving = await asyncio.gather(
            asyncio.gather(*(self._look_at_worker(worker) for worker in actors.rollout_workers)),
            self._serving_version(actors.queue),
        )
        suspects = {name for _, names in found for name in names}
        sick = [(worker, reason) for worker, (reason, _) in zip(actors.rollout_workers, found, strict=True) if reason]
        looked = await asyncio.gather(
            *(self._look_at_engine(engine, serving, actors, engine.name in suspects) for engine in engines)
        )
        return sick + [(engine, reason) for engine, reason in zip(engines, looked, strict=True) if reason]

    async def _serving_version(self, queue: ActorHandle) -> int | None:
        try:
            return await asyncio.wait_for(self._call(queue, "serving_version"), self._config.answer_deadline_s)
        except (InfrastructureFailure, TimeoutError):
            return None

    async def _look_at_worker(self, worker: ActorHandle) -> tuple[str, Iterable[str]]:
        """(why it must be restarted, or nothing; engines that it complains about)"""
        limit_s = self._config.answer_deadline_s
        try:
            health = await asyncio.wait_for(self._call(worker, "health"), limit_s)
        except (TimeoutError, DeadlineExceeded):
            self._misses[worker.key] += 1
            if self._misses[worker.key] < MISSES:
                return "", ()
            return f"{worker} did not say how it is, twice in a row within {limit_s:g} s", ()
        except InfrastructureFailure:
            return "", ()  # lost: who watches for that knows better
        self._misses.pop(worker.key, None)
        return (f"{worker} must be replaced: {health['worn_out']}" if health["worn_out"] else ""), health["suspects"]

    async def _look_at_engine(
        self, engine: ActorHandle, serving: int | None, actors: RunActors, is_suspect: bool
    ) -> str:
        try:
            stats = await asyncio.wait_for(self._call(engine, "stats"), self._config.answer_deadline_s)
        except TimeoutError:
            is_suspect, stats = True, None
        except InfrastructureFailure:
            return ""
        except Exception as error:  # noqa: BLE001 - whatever an engine raises here, it will not generate
            return f"{engine} is dead although its process lives: {error}"
        if is_suspect:
            return await self._probe(engine)
        assert stats is not None
        if serving is None or stats.version >= actors.version_due(engine, serving):
            self._behind.pop(engine.key, None)
            return ""
        self._behind[engine.key] += 1
        if self._behind[engine.key] < MISSES:
            return ""  # a switch is under way, most likely
        return await self._bring_up(engine, serving)

    async def _probe(self, engine: ActorHandle) -> str:
        limit_s = self._config.probe_deadline_s
        try:
            await asyncio.wait_for(self._call(engine, "probe", limit_s), limit_s + self._config.answer_deadline_s)
        except InfrastructureFailure as failure:
            if not isinstance(failure, DeadlineExceeded):
                return ""
            return f"{engine} failed its probe: {failure}"
        except TimeoutError:
            return f"{engine} failed its probe: no answer within {limit_s:g} s"
        except Exception as error:  # noqa: BLE001 - see above
            return f"{engine} failed its probe: {error}"
        return ""

    async def _bring_up(self, engine: ActorHandle, version: int) -> str:
        """An engine that missed a switch (it was being built, or its load failed) loads the version in force, a stale
        one too: the version that it missed may be gone from the store."""
        limit_s = self._config.build_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._call(engine, "suspend")
                try:
                    await self._call(engine, "load", version)
                finally:
                    await self._call(engine, "resume")
        except TimeoutError:
            return f"{engine} did not load version {version} within {limit_s:g} s"
        except InfrastructureFailure:
            return ""
        except Exception as error:  # noqa: BLE001 - see above
            return f"{engine} cannot load version {version}: {error}"
        self._behind.pop(engine.key, None)
        return ""
