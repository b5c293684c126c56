"""An engine as a long-lived actor in the worker of its hardware class. Heavy imports happen in that worker only."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np

from resources.engines.base import EngineStats, GenerateRequest, LoadReport, SamplingParams
from resources.engines.config import EngineConfig
from resources.engines.exchange import Exchange, ExchangeReply, HostedEngine
from resources.failures import DeadlineExceeded

if TYPE_CHECKING:
    from resources.engines.local_weights import WeightSource


class EngineActor:
    """One engine, and the exchange through which proxies reach it.

    All methods are coroutines that only hand over to the engine's own thread, so that calls interleave on the worker's
    event loop.
    """

    def __init__(
        self,
        store_url: str,
        run_id: str,
        version: int,
        config: EngineConfig,
        hardware_class: str,
        name: str,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        """Blocks until version ``version`` of the run is loaded. Raises ValueError for a model that cannot be run."""
        from resources.object_store import ObjectStore
        from resources.weights.store import WeightStore

        weights = WeightStore(ObjectStore.open(store_url), run_id)
        self._serve(build_engine(name, hardware_class, weights, version, config, device=device, threads=threads))

    @classmethod
    def around(cls, engine: HostedEngine) -> EngineActor:
        """An actor around an engine that exists already (in the same process)."""
        actor = cls.__new__(cls)
        actor._serve(engine)
        return actor

    def _serve(self, engine: HostedEngine) -> None:
        self._engine = engine
        # A driver that is killed closes nothing: Dask drops the actor, and the engine's thread and memory go with it.
        self._dropped = weakref.finalize(self, _close_beside, engine)
        self._dropped.atexit = False
        self._exchange = Exchange(engine)
        self._probes = itertools.count()

    async def exchange(
        self,
        proxy_id: str,
        requests: list[GenerateRequest],
        aborts: list[str],
        releases: list[str],
        wait_s: float,
    ) -> ExchangeReply:
        """See `Exchange.exchange`."""
        return await self._exchange.exchange(proxy_id, requests, aborts, releases, wait_s)

    async def prefetch(self, version: int) -> None:
        await self._engine.prefetch(version)

    async def suspend(self) -> None:
        await self._engine.suspend()

    async def load(self, version: int) -> LoadReport:
        return await self._engine.load(version)

    async def resume(self) -> None:
        await self._engine.resume()

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def probe(self, timeout_s: float = 30.0) -> float:
        """Seconds that the generation of one token takes: what shows that an engine lives. 0 while it is suspended.

        Raises EngineFailure when the engine is dead, DeadlineExceeded when no token comes in time.
        """
        started_at = time.perf_counter()
        await self._engine.stats()
        key = f"probe-{next(self._probes)}"
        request = GenerateRequest(key, key, np.zeros(1, dtype=np.int32), SamplingParams(max_new_tokens=1), seed=0)
        if self._engine.suspended:
            return 0.0
        try:
            await asyncio.wait_for(self._engine.generate(request), timeout_s)
        except TimeoutError:
            if self._engine.suspended:
                return 0.0
            raise DeadlineExceeded(
                f"engine {self._engine.name} answers, but generated no token within {timeout_s} s"
            ) from None
        await self._engine.release(key)
        return time.perf_counter() - started_at

    async def close(self) -> None:
        self._dropped.detach()
        await self._engine.close()


def _close_beside(engine: HostedEngine) -> None:
    """In a thread: whoever drops the last reference may be an event loop."""
    threading.Thread(target=lambda: asyncio.run(engine.close()), name=f"close-{engine.name}", daemon=True).start()


def build_engine(
    name: str,
    hardware_class: str,
    weights: WeightSource,
    version: int,
    config: EngineConfig,
    *,
    device: str = "cpu",
    threads: int = 1,
) -> HostedEngine:
    """The engine that ``config.backend`` names."""
    match config.backend:
        case "local":
            from resources.engines.local import LocalEngine

            return LocalEngine(name, hardware_class, weights, version, config, device=device, threads=threads)
        case "simulated":
            from resources.engines.simulated import SimulatedEngine

            return SimulatedEngine(name, hardware_class, weights, version, config)
        case other:
            raise AssertionError(f"EngineConfig lets back end {other!r} pass, and nobody builds it")
