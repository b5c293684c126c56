"""The supervisor of a run's actors: rebuilds what died, restarts what is sick. Who hears of it is in registered.py.

| thread            | waits for                                              | at most                        |
|-------------------|--------------------------------------------------------|--------------------------------|
| the supervisor's  | a loss, a build that ended, the next look (`LOOK_S`)   | the deadlines of what it calls |
| one a build       | the constructor of one actor                           | ``recovery.build_timeout_s``   |
| one a round       | the answers of engines and rollout workers             | ``recovery.probe_deadline_s``  |
| Dask's own loop   | `LossWatch`: which actors the scheduler does not know  | its poll of one second         |
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from resources.failures import InfrastructureFailure, RollartError
from resources.pools.actors import ActorHandle, call_sync
from resources.pools.registry import RunActors
from resources.recovery.config import RecoveryConfig
from resources.recovery.health import HealthRound
from resources.recovery.plan import Build, Decision, GiveUp, GoOnWithout, RecoveryPlan, Seat
from resources.recovery.registered import RegisteredActors

logger = logging.getLogger(__name__)
LOOK_S = 0.5
"""How often free workers are looked for while an actor is missing, in seconds."""
CLOSE_S = 2.0


class Cluster(Protocol):
    """What the supervisor needs of the cluster and of its registry. Methods block."""

    def workers(self) -> Mapping[str, list[str]]:
        """Addresses of the living workers by hardware class."""
        ...

    def restart(self, address: str) -> None:
        """End a worker process; another one takes its place where somebody looks after that."""
        ...

    def publish(self, actors: RunActors) -> None:
        """Make these the run's actors."""
        ...


Builder = Callable[[str, int], ActorHandle]
"""(worker, how often this seat was rebuilt, from 1) -> the new actor. Raises when it cannot be built."""


@dataclass(frozen=True, slots=True)
class _Lost:
    handle: ActorHandle
    reason: str


@dataclass(frozen=True, slots=True)
class _Built:
    seat: Seat
    handle: ActorHandle | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Asked:
    sick: list[tuple[ActorHandle, str]]


class Supervisor:
    """Context manager around the life of a run's actors. ``log`` takes lines for people, from any thread."""

    def __init__(
        self,
        cluster: Cluster,
        actors: RunActors,
        seats: Mapping[Seat, ActorHandle],
        builders: Mapping[str, Builder],
        config: RecoveryConfig,
        log: Callable[[str], None],
        *,
        health: HealthRound | None = None,
        on_replaced: Callable[[ActorHandle, ActorHandle], None] = lambda old, new: None,
        call: Callable[..., Any] = call_sync,
        clock: Callable[[], float] = time.monotonic,
        run_beside: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """
        Args:
            seats: every seat, and its actor.
            builders: by name of the seat; none for what cannot be rebuilt.
            health: asks engines and rollout workers how they are; None: only losses are noticed.
            on_replaced: the actor of a seat is another one now (`LossWatch.replace`).
            run_beside: runs a build or a health round without holding up the caller; default a thread.
        """
        self._cluster, self._builders, self._config, self._log = cluster, dict(builders), config, log
        self._plan = RecoveryPlan({seat: handle.worker for seat, handle in seats.items()}, config)
        self._seats = {handle.name: seat for seat, handle in seats.items()}
        self._handles = {seat.name: handle for seat, handle in seats.items()}
        self._num_built: dict[str, int] = {}
        self._registered = RegisteredActors(actors, cluster.publish, call)
        self._health, self._on_replaced = health, on_replaced
        self._clock = clock
        self._run_beside = run_beside or _in_thread
        self._news: queue.SimpleQueue[_Lost | _Built | _Asked | None] = queue.SimpleQueue()
        self._gone: set[str] = set()
        """Keys of the actors whose loss was taken note of: a restarted process is reported lost once more."""
        self._next_health: float | None = clock() + config.health_period_s
        """None: a round is under way."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-supervisor", daemon=True)

    @property
    def actors(self) -> RunActors:
        """The run's actors as they are registered now."""
        return self._registered.actors

    @property
    def restarts(self) -> dict[str, int]:
        """Actors rebuilt, or being rebuilt, by role."""
        return {str(role): number for role, number in self._plan.restarts.items()}

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._news.put(None)
        self._thread.join(CLOSE_S)

    def note_loss(self, handle: ActorHandle, reason: str) -> None:
        """The actor's worker is gone. Returns at once: it may be called on an event loop."""
        self._news.put(_Lost(handle, reason))

    def check(self) -> None:
        """Raises InfrastructureFailure when the run cannot go on."""
        if self._plan.failure is not None:
            raise InfrastructureFailure(self._plan.failure)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.step(LOOK_S if self._plan.has_gaps else self._config.health_period_s)
            except Exception as error:  # the run must not go on unwatched
                logger.exception("the run's supervisor broke down")
                self._give_up(f"the run's supervisor broke down: {error!r}")
                return

    def step(self, wait_s: float) -> None:
        """Take what is new, waiting at most so long for it; then fill empty seats, and ask who is well."""
        for item in self._take_news(wait_s):
            match item:
                case _Lost(handle, reason):
                    self._take_loss(handle, reason)
                case _Built():
                    self._take_built(item)
                case _Asked(sick):
                    self._next_health = self._clock() + self._config.health_period_s
                    for handle, reason in sick:
                        self._restart(handle, reason)
        if self._ended.is_set() or self._plan.failure is not None:
            return
        now = self._clock()
        if self._plan.has_gaps:
            self._obey(self._plan.look(self._cluster.workers(), now))
        if self._health is not None and self._next_health is not None and now >= self._next_health:
            self._next_health, health, actors = None, self._health, self.actors
            self._run_beside(lambda: self._news.put(_Asked(health.sick(actors))))

    def _take_news(self, wait_s: float) -> list[_Lost | _Built | _Asked]:
        items: list[_Lost | _Built | _Asked] = []
        try:
            item = self._news.get(timeout=wait_s) if wait_s > 0 else self._news.get_nowait()
            while True:
                if item is not None:
                    items.append(item)
                item = self._news.get_nowait()
        except queue.Empty:
            return items

    def _take_loss(self, handle: ActorHandle, reason: str) -> None:
        seat = self._seats.get(handle.name)
        if seat is None or handle.key in self._gone:
            return
        self._gone.add(handle.key)
        self._log(reason)
        if seat.role == "environment":
            self._registered.tell_queue("worker_lost", handle.name, reason)
        self._obey(self._plan.lost(seat.name, reason, self._clock()))

    def _obey(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Build(seat, worker):
                    self._log(f"{seat.name} is built again on {worker}")
                    self._run_beside(lambda seat=seat, worker=worker: self._build(seat, worker))
                case GoOnWithout(seat, reason):
                    self._log(reason)
                    self._replace(seat, None)
                case GiveUp(reason):
                    self._give_up(reason)

    def _build(self, seat: Seat, worker: str) -> None:
        nth = self._num_built[seat.name] = self._num_built.get(seat.name, 0) + 1
        try:
            handle = self._builders[seat.name](worker, nth)
        except Exception as error:  # noqa: BLE001 - whatever it was: it counts as one more loss, and the message says it
            self._news.put(_Built(seat, None, f"{type(error).__name__}: {error}"))
        else:
            self._news.put(_Built(seat, handle))

    def _take_built(self, built: _Built) -> None:
        if built.handle is None:
            reason = f"{built.seat.name} could not be built again: {built.error}"
            self._log(reason)
            self._obey(self._plan.lost(built.seat.name, reason, self._clock()))
            return
        self._plan.built(built.seat.name)
        self._replace(built.seat, built.handle)
        self._log(f"{built.handle} takes the place that {built.seat.name} had left")

    def _replace(self, seat: Seat, new: ActorHandle | None) -> None:
        """Put another actor, or none, into a seat."""
        old = self._handles[seat.name]
        if new is not None:
            self._handles[seat.name] = new
            self._seats[new.name] = seat
            self._on_replaced(old, new)
        self._registered.replace(seat, old, new, self.restarts)

    def _restart(self, handle: ActorHandle, reason: str) -> None:
        self._log(f"{reason}; its worker process is restarted")
        try:
            self._cluster.restart(handle.worker)
        except RollartError as failure:
            self._log(str(failure))
        self._take_loss(handle, reason)

    def _give_up(self, reason: str) -> None:
        self._plan.failure = self._plan.failure or reason
        self._log(f"the run cannot go on: {reason}")
        self._registered.give_up(reason)


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rebuild", daemon=True).start()
