"""Who are the run's actors now, and who is told when one of them is another one, or gone for good?

Everybody who asks the registry sees the change; rollout workers, which hold handles of engines, are told of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from resources.failures import DeadlineExceeded, InfrastructureFailure, RollartError
from resources.pools.actors import ActorHandle
from resources.pools.registry import RunActors
from resources.recovery.plan import Seat
from resources.recovery.whole import FAILURE, RESTARTS

logger = logging.getLogger(__name__)
TELL_S = 15.0
"""Longest time an actor may take to hear of another one."""


class RegisteredActors:
    """Belongs to the supervisor's thread. Calls block, at most `TELL_S` for each actor that is told."""

    def __init__(self, actors: RunActors, publish: Callable[[RunActors], None], call: Callable[..., Any]) -> None:
        """
        Args:
            publish: makes these the run's actors.
            call: ``call(actor, method, *arguments, timeout_s=...)``.
        """
        self.actors = actors
        """As they are registered now."""
        self._publish, self._call = publish, call

    def replace(self, seat: Seat, old: ActorHandle, new: ActorHandle | None, restarts: Mapping[str, int]) -> None:
        """``new``, or nobody, takes the place of ``old``; ``restarts``: actors rebuilt so far, by role."""
        actors = with_replaced(self.actors, seat, old, new)
        self.actors = replace(actors, facts={**actors.facts, RESTARTS: dict(restarts)})
        self._publish(self.actors)
        if seat.role == "engine":
            for worker in self.actors.rollout_workers:
                self._tell_engines(worker)
        elif seat.role == "environment" and new is not None:
            self._tell_engines(new)  # an engine may have changed while it was built

    def give_up(self, reason: str) -> None:
        """The run cannot go on: whoever waits for its actors, or for a batch, hears why."""
        self.actors = replace(self.actors, facts={**self.actors.facts, FAILURE: reason})
        try:
            self._publish(self.actors)
        except (RollartError, OSError) as failure:
            logger.warning("the end of the run could not be published: %s", failure)
        self.tell_queue("fail", reason)

    def tell_queue(self, method: str, *arguments: Any) -> None:
        """Call a method of the group queue; a queue that does not hear is only logged."""
        try:
            self._call(self.actors.queue, method, *arguments, timeout_s=TELL_S)
        except (InfrastructureFailure, DeadlineExceeded) as failure:
            logger.warning("the group queue was not told: %s", failure)  # its own loss is noticed elsewhere

    def _tell_engines(self, worker: ActorHandle) -> None:
        engines = {name: [(each.name, each) for each in members] for name, members in self.actors.engines.items()}
        try:
            self._call(worker, "set_engines", engines, timeout_s=TELL_S)
        except (InfrastructureFailure, DeadlineExceeded) as failure:
            logger.warning("%s was not told of the engines: %s", worker, failure)  # it is sick or gone itself


def with_replaced(actors: RunActors, seat: Seat, old: ActorHandle, new: ActorHandle | None) -> RunActors:
    """The actors with ``new`` in the place of ``old``, which may have been taken out before."""

    def swapped(members: tuple[ActorHandle, ...]) -> tuple[ActorHandle, ...]:
        kept = [each for each in members if each != old]
        return tuple(sorted([*kept, *([new] if new is not None else [])], key=lambda each: each.name))

    match seat.role:
        case "learner":
            return replace(actors, learner=new or actors.learner)
        case "environment":
            return replace(actors, rollout_workers=swapped(actors.rollout_workers))
        case "engine":
            name = seat.classes[0]
            return replace(actors, engines={**actors.engines, name: swapped(actors.engines.get(name, ()))})
    raise AssertionError(f"{seat} is never rebuilt")
