"""A run's long-lived actors on a Dask cluster: learner, engines, group queue, rollout workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from distributed import Client

from flows.config import RunConfig
from resources.engines.actor import EngineActor
from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.hardware import PoolsConfig
from resources.pools.actors import ActorHandle, call, call_sync
from resources.pools.liveness import LossWatch
from resources.pools.placement import release_actor, start_actor, workers_by_class
from resources.pools.registry import RunActors, publish, withdraw
from resources.rollout.group_queue import GroupQueue
from resources.rollout.worker import RolloutWorker
from resources.runs import ResumePoint, RunRef, num_resumes
from tasks.training.owner import LearnerActor

logger = logging.getLogger(__name__)
CLOSE_S = 4.0
"""All actors together may take this long to close; those left then end with their worker processes."""
FIRST_CALL_S = 120.0


@dataclass(frozen=True)
class Plane:
    """What the driver holds of a run's actors."""

    actors: RunActors
    watch: LossWatch

    def check(self) -> None:
        """Raises InfrastructureFailure when an actor that the run cannot do without was lost with its worker.

        What a lost rollout worker played is played on the others; without any other the run cannot go on.
        """
        workers = {worker.name for worker in self.actors.rollout_workers}
        lost = self.watch.lost.keys()
        if lost - workers or workers <= lost:
            self.watch.raise_if_lost()


@contextmanager
def rollout_plane(
    client: Client,
    serving: Mapping[str, str],
    run: RunRef,
    config: RunConfig,
    model_directory: str | None,
    point: ResumePoint | None,
) -> Iterator[Plane]:
    """Start the run's actors, publish them in the registry, and close them with the block.

    Args:
        serving: for each hardware class the class whose workers serve it (itself, or a declared fallback).
        model_directory: Hugging Face directory that the learner starts from; None: nothing is trained here.
        point: where a resumed run goes on; None: version 0.
    """
    with ExitStack() as stack:
        place = _Placement(client, config.pools, serving, stack)
        version = point.version if point else 0
        learner = None if model_directory is None else place.learner(run, config, model_directory, point)
        engines = place.engines(run, config, version)
        queue = place.one(
            "control",
            GroupQueue,
            run.service_id,
            run.store_url,
            dict(config.families),
            config.rollout,
            config.seed,
            {**(point.queue_state if point else {"version": 0}), "life": num_resumes(run)},
            num_batches=version if learner is None else config.num_iterations,
            closing=True,
        )
        workers = place.rollout_workers(run, config, queue, engines)
        actors = RunActors(run.service_id, engines, learner, queue, workers)
        publish(client, actors)
        stack.callback(_quietly, withdraw, client, run.service_id)
        watch = stack.enter_context(LossWatch(actors.handles(), _tell_queue(actors)))
        yield Plane(actors, watch)


def _tell_queue(actors: RunActors) -> Callable[[ActorHandle, str], None]:
    """What a loss means for rollouts: trajectories of a lost worker are played elsewhere, and without any worker nobody
    waits any longer. A lost engine or learner fails the next stage that calls it."""
    left = {worker.name for worker in actors.rollout_workers}

    def on_loss(handle: ActorHandle, reason: str) -> None:
        if handle.name not in left:
            return
        left.discard(handle.name)
        method, arguments = ("worker_lost", (handle.name, reason)) if left else ("fail", (reason,))
        telling = asyncio.ensure_future(call(actors.queue, method, *arguments))
        telling.add_done_callback(_log_failure)

    return on_loss


def _log_failure(telling: asyncio.Future[None]) -> None:
    if not telling.cancelled() and telling.exception() is not None:
        logger.warning("the group queue could not be told of a loss: %s", telling.exception())


class _Placement:
    """Starts actors on the workers of their class; closes them in reverse order."""

    def __init__(self, client: Client, pools: PoolsConfig, serving: Mapping[str, str], stack: ExitStack) -> None:
        self._client = client
        self._pools = pools
        self._serving = serving
        self._stack = stack
        self._workers = workers_by_class(client)
        self._close_by: float | None = None

    def one(self, role: str, cls: type, *args: object, closing: bool = False, **kwargs: object) -> ActorHandle:
        """The single actor of a role, on the first worker of its class."""
        hardware_class = self._serving[self._pools.of_role(role)[0]]
        return self._start(cls, self._workers[hardware_class][0], role, args, kwargs, closing)

    def learner(self, run: RunRef, config: RunConfig, model_directory: str, point: ResumePoint | None) -> ActorHandle:
        """The learner, with its version published: engines start from the weight store."""
        hardware_class = self._pools.classes[self._pools.of_role("learner")[0]]
        learner = self.one(
            "learner",
            LearnerActor,
            run.model_dump(),
            config.training.model_dump(mode="json"),
            model_directory,
            config.seed,
            config.num_iterations,
            len(config.families),
            config.rollout.max_staleness,
            device=hardware_class.device,
            threads=hardware_class.torch_threads,
            resume_version=point.version if point else None,
            checkpoint_keep=config.checkpoint_keep,
        )
        call_sync(learner, "publish", timeout_s=FIRST_CALL_S)
        return learner

    def engines(self, run: RunRef, config: RunConfig, version: int) -> dict[str, tuple[ActorHandle, ...]]:
        """One engine on every worker of every class that serves; a class without workers has a fallback that does."""
        names = sorted({self._serving[name] for name in self._pools.of_role("engine")})
        places = [(name, index, worker) for name in names for index, worker in enumerate(self._workers[name])]

        def start(place: tuple[str, int, str]) -> ActorHandle:
            name, index, worker = place
            return self._start(
                EngineActor,
                worker,
                f"engine-{name}-{index}",
                (run.store_url, run.run_id, version, config.engine, name, f"{name}-{index}"),
                {"device": self._pools.classes[name].device, "threads": self._pools.classes[name].torch_threads},
                True,
            )

        # At once: each loads a model, and there may be many.
        with ThreadPoolExecutor(min(len(places), 16), thread_name_prefix="engine-start") as threads:
            handles = list(threads.map(start, places))
        return {
            name: tuple(handle for handle, place in zip(handles, places, strict=True) if place[0] == name)
            for name in names
        }

    def rollout_workers(
        self, run: RunRef, config: RunConfig, queue: ActorHandle, engines: dict[str, tuple[ActorHandle, ...]]
    ) -> tuple[ActorHandle, ...]:
        """One rollout worker on every worker of the environment classes."""
        workers = [w for name in self._pools.of_role("environment") for w in self._workers[self._serving[name]]]
        by_class = {name: [(engine.name, engine) for engine in of_class] for name, of_class in engines.items()}
        fallback = {name: list(c.fallback) for name, c in self._pools.classes.items() if c.role == "engine"}
        return tuple(
            self._start(
                RolloutWorker,
                worker,
                f"rollout-{index}",
                (
                    f"rollout-{index}",
                    run.service_id,
                    run.store_url,
                    queue,
                    by_class,
                    dict(config.families),
                    config.rollout,
                ),
                {"fallback": fallback, "policy_run_id": run.run_id, "context_length": config.engine.context_length},
                True,
            )
            for index, worker in enumerate(dict.fromkeys(workers))
        )

    def _close(self, handle: ActorHandle) -> None:
        self._close_by = self._close_by or time.monotonic() + CLOSE_S
        left_s = self._close_by - time.monotonic()
        if left_s > 0:
            _quietly(call_sync, handle, "close", timeout_s=left_s)

    def _start(
        self, cls: type, worker: str, name: str, args: tuple[object, ...], kwargs: dict[str, object], closing: bool
    ) -> ActorHandle:
        handle = start_actor(self._client, cls, *args, worker=worker, name=name, timeout_s=FIRST_CALL_S, **kwargs)
        self._stack.callback(_quietly, release_actor, handle)
        if closing:
            self._stack.callback(self._close, handle)
        return handle


def _quietly(function, *args, **kwargs) -> None:
    """Close what can be closed: at the end of a run a worker may be gone already, and its process ends anyway."""
    with suppress(InfrastructureFailure, DeadlineExceeded, OSError):
        function(*args, **kwargs)
