"""When may a stage that lost its worker, or an actor that it called, be run again?"""

from __future__ import annotations

import time
from collections.abc import Callable

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.pools.actors import ActorHandle, lives_sync
from resources.pools.registry import RunActors, lookup_sync

FAILURE = "failure"
"""Fact of the registry's entry: why the run cannot go on."""
RESTARTS = "restarts"
"""Fact of the registry's entry: actors rebuilt, by role."""
POLL_S = 0.25


def wait_until_whole(
    service_id: str,
    timeout_s: float,
    *,
    find: Callable[[str], RunActors] = lambda service_id: lookup_sync(service_id, max_age_s=0.0),
    lives: Callable[[ActorHandle], bool] = lives_sync,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RunActors:
    """The run's actors, as soon as learner, group queue and at least one engine live.

    Raises:
        InfrastructureFailure: the run's supervisor has given up; says why.
        DeadlineExceeded: after ``timeout_s`` seconds; names the actors that are missing.
    """
    start = clock()
    while True:
        actors = find(service_id)
        if FAILURE in actors.facts:
            raise InfrastructureFailure(actors.facts[FAILURE])
        missing = [each for each in (actors.learner, actors.queue) if each is not None and not lives(each)]
        engines = [each for of_class in actors.engines.values() for each in of_class]
        if not any(lives(each) for each in engines):
            missing += engines
        if not missing:
            return actors
        if clock() - start >= timeout_s:
            raise DeadlineExceeded(
                f"waited {timeout_s:g} s for the run to be whole again; still missing: {', '.join(map(str, missing))}"
            )
        sleep(POLL_S)
