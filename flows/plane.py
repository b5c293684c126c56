"""A run's long-lived actors on a Dask cluster, and their supervisor: learner, engines, group queue, rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field

from distributed import Client

from flows.actor_builders import ActorBuilders, engine_name, quietly
from flows.config import RunConfig
from resources.pools.actors import ActorHandle, call_sync
from resources.pools.liveness import LossWatch
from resources.pools.placement import restart_worker, workers_by_class
from resources.pools.registry import RunActors, publish, withdraw
from resources.recovery.health import HealthRound
from resources.recovery.plan import Seat
from resources.recovery.supervisor import Builder, Supervisor
from resources.rollout.cross_policy import stale_members
from resources.runs import ResumePoint, RunRef, checkpoint_versions

VERSION_S = 15.0
"""Longest wait for the group queue to tell the version in force, in seconds."""


@dataclass(frozen=True)
class Plane:
    """What the driver holds of a run's actors."""

    supervisor: Supervisor

    @property
    def actors(self) -> RunActors:
        """The actors as they are registered now."""
        return self.supervisor.actors

    def check(self) -> None:
        """Raises InfrastructureFailure when an actor was lost that the run cannot do without and nobody can rebuild."""
        self.supervisor.check()


@contextmanager
def rollout_plane(
    client: Client,
    serving: Mapping[str, str],
    run: RunRef,
    config: RunConfig,
    model_directory: str | None,
    point: ResumePoint | None,
    log: Callable[[str], None],
) -> Iterator[Plane]:
    """Start the run's actors, publish them in the registry, supervise them, and close them with the block.

    Args:
        serving: for each hardware class the class whose workers serve it (itself, or a declared fallback).
        model_directory: Hugging Face directory that the learner starts from; None: nothing is trained here.
        point: where a resumed run goes on; None: version 0.
        log: takes one line about a loss, a rebuild or the end of the run; called from other threads, in the context of
            this call.
    """
    with ExitStack() as stack:
        crew = _Crew(client, ActorBuilders(client, run, config, stack), run, config, serving)
        actors = crew.start(model_directory, point)
        publish(client, actors)
        stack.callback(quietly, withdraw, client, run.service_id)
        supervisor = Supervisor(
            _RunCluster(client),
            actors,
            crew.seats,
            crew.rebuild,
            config.recovery,
            _in_this_context(log),
            health=HealthRound(config.recovery),
            on_replaced=lambda old, new: watch.replace(old, new),
        )
        watch = LossWatch(actors.handles(), supervisor.note_loss)
        crew.actors = lambda: supervisor.actors
        with watch, supervisor:
            yield Plane(supervisor)


def _in_this_context(log: Callable[[str], None]) -> Callable[[str], None]:
    """The same for other threads. Prefect's settings are a context variable: a logger that is used outside of it would
    look for another server, and start one."""
    context = copy_context()
    return lambda line: context.copy().run(log, line)


@dataclass(frozen=True)
class _RunCluster:
    """The cluster as `Supervisor` needs it."""

    client: Client

    def workers(self) -> Mapping[str, list[str]]:
        return workers_by_class(self.client)

    def restart(self, address: str) -> None:
        restart_worker(self.client, address)

    def publish(self, actors: RunActors) -> None:
        publish(self.client, actors, replace=True)


@dataclass
class _Crew:
    """The run's actors on the workers of their classes, and how each is built again."""

    client: Client
    build: ActorBuilders
    run: RunRef
    config: RunConfig
    serving: Mapping[str, str]
    seats: dict[Seat, ActorHandle] = field(default_factory=dict)
    rebuild: dict[str, Builder] = field(default_factory=dict)
    """By name of the seat."""
    actors: Callable[[], RunActors] = field(init=False)
    """As they are registered when an actor is rebuilt."""

    def start(self, model_directory: str | None, point: ResumePoint | None) -> RunActors:
        workers = workers_by_class(self.client)
        version = point.version if point else 0
        learner = None
        refresh_every = self._refresh_every(workers) if model_directory is not None else {}
        if model_directory is not None:
            learner = self._learner(workers, model_directory, point)
            # Engines start from the weight store.
            call_sync(learner, "publish", version, timeout_s=self.config.recovery.build_timeout_s)
        engines = self._engines(workers, version, refresh_every)
        control = self._class_of("control")
        queue = self.build.queue(
            workers[control][0], point, num_batches=version if learner is None else self.config.num_iterations
        )
        self.seats[Seat("control", "control", (control,))] = queue
        rollout_workers = self._rollout_workers(workers, queue, engines, list(refresh_every))
        return RunActors(self.run.service_id, engines, learner, queue, rollout_workers, refresh_every=refresh_every)

    def _refresh_every(self, workers: Mapping[str, list[str]]) -> dict[str, int]:
        """Stale engines of every class that generates for training, by name. Raises ValueError for a class that would
        have no other."""
        cross_policy = self.config.rollout.cross_policy
        if cross_policy is None:
            return {}
        names = sorted({self.serving[family.hardware_class] for family in self.config.families.values()})
        return {
            engine_name(name, index): cross_policy.refresh_every
            for name in names
            for index in stale_members(cross_policy, name, range(len(workers[name])))
        }

    def _class_of(self, role) -> str:
        """The class whose workers serve the only class of a role."""
        return self.serving[self.config.pools.of_role(role)[0]]

    def _learner(
        self, workers: Mapping[str, list[str]], model_directory: str, point: ResumePoint | None
    ) -> ActorHandle:
        hardware_class = self._class_of("learner")
        num_ranks = self.config.training.ranks or len(workers[hardware_class])

        def again(worker: str, nth: int) -> ActorHandle:
            self.build.prepare(worker, "learner")
            # The newest complete one: an update is done with its checkpoint, and before that it is done again.
            newest = max(checkpoint_versions(self.run), default=None)
            return self.build.learner(worker, hardware_class, model_directory, newest, num_ranks=num_ranks)

        version = point.version if point else None
        learner = self.build.learner(workers[hardware_class][0], hardware_class, model_directory, version)
        self.seats[Seat("learner", "learner", (hardware_class,))] = learner
        self.rebuild["learner"] = again
        return learner

    def _engines(
        self, workers: Mapping[str, list[str]], version: int, stale: Collection[str]
    ) -> dict[str, tuple[ActorHandle, ...]]:
        """One engine on every worker of every class that serves; a class without workers has a fallback that does. A
        stale engine stands in for no current one."""
        names = sorted({self.serving[name] for name in self.config.pools.of_role("engine")})
        places = [(name, index, worker) for name in names for index, worker in enumerate(workers[name])]

        def rebuilder(hardware_class: str, index: int) -> Builder:
            def again(worker: str, nth: int) -> ActorHandle:
                self.build.prepare(worker, "engine")
                in_force = self._serving_version()
                engine = self.build.engine(worker, hardware_class, index, in_force)
                if (loaded_meanwhile := self._serving_version()) != in_force:
                    self._bring_up(engine, loaded_meanwhile)
                return engine

            return again

        # At once: each loads a model, and there may be many.
        with ThreadPoolExecutor(min(len(places), 16), thread_name_prefix="engine-start") as threads:
            handles = list(threads.map(lambda place: self.build.engine(place[2], place[0], place[1], version), places))
        by_class: dict[str, list[ActorHandle]] = {name: [] for name in names}
        for (name, index, _), handle in zip(places, handles, strict=True):
            by_class[name].append(handle)
            self.rebuild[handle.name] = rebuilder(name, index)
        for (name, _, _), handle in zip(places, handles, strict=True):
            generating = {name, *self.config.pools.classes[name].fallback}
            others = [each.name for other in sorted(generating & set(names)) for each in by_class[other]]
            stand_ins = tuple(
                each for each in others if each != handle.name and (each not in stale or handle.name in stale)
            )
            self.seats[Seat(handle.name, "engine", (name,), stand_ins)] = handle
        return {name: tuple(handles) for name, handles in by_class.items()}

    def _serving_version(self) -> int:
        return call_sync(self.actors().queue, "serving_version", timeout_s=VERSION_S)

    def _bring_up(self, engine: ActorHandle, version: int) -> None:
        """A switch went by while the engine was built: it must not begin under the version before."""
        for method, arguments in (("suspend", ()), ("load", (version,)), ("resume", ())):
            call_sync(engine, method, *arguments, timeout_s=self.config.recovery.build_timeout_s)

    def _rollout_workers(
        self,
        workers: Mapping[str, list[str]],
        queue: ActorHandle,
        engines: Mapping[str, tuple[ActorHandle, ...]],
        stale: Sequence[str],
    ) -> tuple[ActorHandle, ...]:
        """One rollout worker on every worker of the environment classes."""
        classes = tuple(dict.fromkeys(self.serving[name] for name in self.config.pools.of_role("environment")))
        addresses = list(dict.fromkeys(address for name in classes for address in workers[name]))
        names = [f"rollout-{index}" for index in range(len(addresses))]

        def rebuilder(name: str) -> Builder:
            def again(worker: str, nth: int) -> ActorHandle:
                self.build.prepare(worker, "environment")
                return self.build.rollout_worker(worker, f"{name}-r{nth}", queue, self.actors().engines, stale)

            return again

        handles = [
            self.build.rollout_worker(address, name, queue, engines, stale)
            for name, address in zip(names, addresses, strict=True)
        ]
        for name, handle in zip(names, handles, strict=True):
            stand_ins = tuple(other for other in names if other != name)
            self.seats[Seat(name, "environment", classes, stand_ins)] = handle
            self.rebuild[name] = rebuilder(name)
        return tuple(handles)
