"""A rollout worker: an actor that plays trajectories on a thread and event loop of its own.

The actor's methods run on the loop of the Dask worker that hosts it; playing there would delay its heartbeats and
transfers. So the trajectories, the proxy and the writer (worker_parts.py) live on another loop, and the methods only
hand over to it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from resources.environments.family import FamilyConfig
from resources.environments.registry import instantiate
from resources.failures import DeadlineExceeded, InfrastructureFailure, RollartError
from resources.object_store import ObjectStore
from resources.pools.actors import call_sync
from resources.rollout.config import RolloutConfig
from resources.rollout.loop_monitor import Blockade, LoopMonitor
from resources.rollout.policy_files import fetch_policy_files, read_context_length
from resources.rollout.worker_parts import Engines, WorkerParts

START_DEADLINE_S = 30.0
CLOSE_DEADLINE_S = 15.0
TELL_S = 5.0
"""Longest wait for the group queue to take note of a blocked event loop, in seconds."""
logger = logging.getLogger(__name__)


class RolloutWorker:
    """See the module. Construction blocks until the worker's loop runs (imports and tokenizer included)."""

    def __init__(
        self,
        worker_id: str,
        run_id: str,
        store_url: str,
        queue: Any,
        engines: Engines,
        families: Mapping[str, FamilyConfig],
        config: RolloutConfig,
        *,
        fallback: Mapping[str, Sequence[str]] | None = None,
        policy_directory: str | None = None,
        policy_run_id: str | None = None,
        context_length: int | None = None,
        stale_engines: Collection[str] = (),
    ) -> None:
        """
        Args:
            queue: the group queue (an actor handle or a plain object).
            engines: by hardware class, (name, actor).
            fallback: compatible classes of each class, in order.
            policy_directory: where the tokenizer is; None: beside the newest weights of ``policy_run_id``.
            policy_run_id: run whose policy plays; None: ``run_id``.
            context_length: tokens of a trajectory, at most; None: what the policy was built for.
            stale_engines: names of the engines that load only some versions (cross-policy sampling).

        Raises ValueError for a family whose environment, scorer or hardware class cannot be had.
        """
        self.worker_id = worker_id
        self._config = config
        self._queue = queue
        _check_classes(families, engines, fallback or {})
        for family in families.values():
            instantiate(family)
        store = ObjectStore.open(store_url)
        directory = Path(policy_directory) if policy_directory else fetch_policy_files(store, policy_run_id or run_id)
        self._parts = WorkerParts(
            worker_id,
            run_id,
            store,
            queue,
            engines,
            families,
            config,
            fallback=fallback or {},
            policy_directory=directory,
            context_length=context_length or read_context_length(directory),
            stale_engines=stale_engines,
        )
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._monitor: LoopMonitor | None = None
        self._thread = threading.Thread(target=self._run, name=f"rollout-{worker_id}", daemon=True)
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S):
            raise DeadlineExceeded(
                f"the loop of rollout worker {worker_id} did not start within {START_DEADLINE_S:g} s"
            )
        if self._failure is not None:
            raise self._failure
        # What start-up made (imports, tokenizer) lives as long as the process. The collector need not look at it again
        # and again while trajectories come and go: that took a quarter of a worker's CPU time.
        gc.collect()
        gc.freeze()

    async def stats(self) -> dict[str, Any]:
        """JSON-able figures of this worker, its proxy and its caches."""
        return await self._on_loop(self._parts.stats())

    async def health(self) -> dict[str, Any]:
        """``worn_out``: why this process must be replaced, or nothing; ``suspects``: engines that failed here since the
        last call."""
        if not self._thread.is_alive():
            return {"worn_out": f"its event loop has ended ({self._failure or 'closed'})", "suspects": []}
        blockade = self._monitor.look() if self._monitor is not None else None
        if blockade is not None:  # the loop cannot answer
            is_limit = blockade.seconds >= self._config.loop_block_limit_s
            return {"worn_out": str(blockade) if is_limit else "", "suspects": []}
        return await self._on_loop(self._parts.health())

    async def set_engines(self, engines: Engines) -> None:
        """Use these engines from now on (a supervisor has rebuilt one, or added one)."""
        await self._on_loop(self._parts.set_engines(engines))

    async def close(self) -> None:
        """Cancel what is played, seal what is written, end the thread. No-op when closed before."""
        if self._loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # its loop ended by itself this moment: the run is over
                self._loop.call_soon_threadsafe(self._parts.stop)
            await asyncio.to_thread(self._thread.join, CLOSE_DEADLINE_S)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"rollout worker {self.worker_id} did not end within {CLOSE_DEADLINE_S:g} s of its close"
                )

    async def _on_loop(self, work: Any) -> Any:
        if self._loop is None or not self._thread.is_alive():
            work.close()
            raise InfrastructureFailure(f"rollout worker {self.worker_id} has ended ({self._failure or 'closed'})")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the loop of rollout worker {self.worker_id} did not answer within {CLOSE_DEADLINE_S:g} s"
            ) from None

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - kept for the next caller; a thread has nobody else to tell
            self._failure = error
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts.open()
        self._monitor = LoopMonitor(
            self._loop, threading.get_ident(), self._tell_blocked, after_s=self._config.loop_block_after_s
        )
        self._monitor.start()
        self._started.set()
        try:
            await self._parts.run()
        finally:
            self._monitor.stop()

    def _tell_blocked(self, blockade: Blockade) -> None:
        """From the monitor's thread: the worker's own reports wait for the loop that is blocked."""
        logger.error("rollout worker %s: %s", self.worker_id, blockade)
        try:
            call_sync(
                self._queue,
                "worker_blocked",
                self.worker_id,
                blockade.trajectory_id,
                str(blockade),
                timeout_s=TELL_S,
            )
        except (RollartError, OSError) as error:
            logger.warning("the group queue was not told of a blocked event loop: %s", error)


def _check_classes(
    families: Mapping[str, FamilyConfig], engines: Engines, fallback: Mapping[str, Sequence[str]]
) -> None:
    for name, family in families.items():
        classes = (family.hardware_class, *fallback.get(family.hardware_class, ()))
        if not any(engines.get(hardware_class) for hardware_class in classes):
            raise ValueError(
                f"families.{name}.hardware_class is {family.hardware_class!r}, but neither it nor a fallback of it has "
                f"an engine; engines exist for {sorted(key for key, members in engines.items() if members)}"
            )
