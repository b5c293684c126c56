"""How is each actor of a run built, at its start and again after its worker was lost?"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from distributed import Client
from distributed import TimeoutError as DaskTimeoutError

from flows.config import RunConfig
from flows.pools import role_imports
from resources.engines.actor import EngineActor
from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.hardware import Role
from resources.pools.actors import ActorHandle, call_sync
from resources.pools.import_ahead import import_all
from resources.pools.placement import release_actor, start_actor
from resources.rollout.group_queue import GroupQueue
from resources.rollout.worker import RolloutWorker
from resources.runs import ResumePoint, RunRef, num_resumes
from tasks.training.owner import LearnerActor

CLOSE_S = 4.0
"""All actors together may take this long to close; those left then end with their worker processes."""


class ActorBuilders:
    """Builds actors on given workers, from any thread; what was built is closed, newest first, with ``stack``."""

    def __init__(self, client: Client, run: RunRef, config: RunConfig, stack: ExitStack) -> None:
        self._client, self._run, self._config = client, run, config
        self._stack = stack
        self._stack_lock = threading.Lock()
        self._close_by: float | None = None

    def prepare(self, worker: str, role: Role) -> None:
        """Let a worker that was just started import what the role needs, before anything else imports there."""
        names = role_imports(self._config.engine.backend)[role]
        limit_s = self._config.recovery.build_timeout_s
        importing = self._client.submit(import_all, names, workers=[worker], allow_other_workers=False, pure=False)
        try:
            importing.result(timeout=limit_s)
        except DaskTimeoutError as error:
            raise DeadlineExceeded(f"worker {worker} did not import {names} within {limit_s:g} s") from error

    def learner(
        self,
        worker: str,
        worker_class: str,
        model_directory: str,
        version: int | None,
        *,
        num_ranks: int | None = None,
    ) -> ActorHandle:
        """The learner, from a checkpoint (``version``) or from the start; its ranks live on workers of that class.

        ``num_ranks``: of the learner whose place it takes; None: it is the first.
        """
        config = self._config
        hardware_class = config.pools.classes[config.pools.of_role("learner")[0]]
        return self._start(
            LearnerActor,
            worker,
            "learner",
            self._run.model_dump(),
            config.training.for_families(config.families).model_dump(mode="json"),
            model_directory,
            config.seed,
            config.num_iterations,
            len(config.families),
            config.rollout.lag_bound,
            device=hardware_class.device,
            threads=hardware_class.torch_threads,
            resume_version=version,
            hardware_class=worker_class,
            num_ranks=num_ranks,
            closing=True,
        )

    def engine(self, worker: str, hardware_class: str, index: int, version: int) -> ActorHandle:
        """The engine with this number among those of its class, with the weights of a version."""
        settings = self._config.pools.classes[hardware_class]
        return self._start(
            EngineActor,
            worker,
            engine_name(hardware_class, index),
            self._run.store_url,
            self._run.run_id,
            version,
            self._config.engine,
            hardware_class,
            f"{hardware_class}-{index}",
            device=settings.device,
            threads=settings.torch_threads,
            closing=True,
        )

    def queue(self, worker: str, point: ResumePoint | None, num_batches: int) -> ActorHandle:
        """The group queue, from a resume's state or from the start."""
        config = self._config
        return self._start(
            GroupQueue,
            worker,
            "control",
            self._run.service_id,
            self._run.store_url,
            dict(config.families),
            config.rollout,
            config.seed,
            {**(point.queue_state if point else {"version": 0}), "life": num_resumes(self._run)},
            num_batches=num_batches,
            closing=True,
        )

    def rollout_worker(
        self,
        worker: str,
        name: str,
        queue: ActorHandle,
        engines: Mapping[str, Sequence[ActorHandle]],
        stale_engines: Sequence[str],
    ) -> ActorHandle:
        """A rollout worker; a rebuilt one has a name of its own, or it could be taken for the one that was lost."""
        config = self._config
        return self._start(
            RolloutWorker,
            worker,
            name,
            name,
            self._run.service_id,
            self._run.store_url,
            queue,
            {each: [(engine.name, engine) for engine in of_class] for each, of_class in engines.items()},
            dict(config.families),
            config.rollout,
            fallback={each: list(config.pools.classes[each].fallback) for each in config.pools.of_role("engine")},
            policy_run_id=self._run.run_id,
            context_length=config.engine.context_length,
            stale_engines=tuple(stale_engines),
            closing=True,
        )

    def _start(
        self, cls: type, worker: str, name: str, *args: Any, closing: bool = False, **kwargs: Any
    ) -> ActorHandle:
        limit_s = self._config.recovery.build_timeout_s
        handle = start_actor(self._client, cls, *args, worker=worker, name=name, timeout_s=limit_s, **kwargs)
        with self._stack_lock:
            self._stack.callback(quietly, release_actor, handle)
            if closing:
                self._stack.callback(self._close, handle)
        return handle

    def _close(self, handle: ActorHandle) -> None:
        self._close_by = self._close_by or time.monotonic() + CLOSE_S
        left_s = self._close_by - time.monotonic()
        if left_s > 0:
            quietly(call_sync, handle, "close", timeout_s=left_s)


def engine_name(hardware_class: str, index: int) -> str:
    """Name of the engine with this number among those of its class, whichever actor it is at the time."""
    return f"engine-{hardware_class}-{index}"


def quietly(function, *args, **kwargs) -> None:
    """Close what can be closed: at the end of a run a worker may be gone already, and its process ends anyway."""
    with suppress(InfrastructureFailure, DeadlineExceeded, OSError):
        function(*args, **kwargs)
