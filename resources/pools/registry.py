"""Where do stages and proxies find the actors of their run?

The driver publishes plain handles under the run's id; workers look them up. Handles hold nothing alive: when a driver
is gone, Dask releases its actors, and its entry is swept away by the next run that publishes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.pools.actors import ActorHandle, actor_lives
from resources.pools.link import DaskLink, find_link, scheduler_address

PREFIX = "rollart-run/"
MAX_AGE_S = 5.0
"""How old an answer from the cache may be; a supervisor that rebuilds an actor publishes anew."""
LOOKUP_S = 10.0


@dataclass(frozen=True, slots=True)
class RunActors:
    """The actors of one run."""

    run_id: str
    engines: dict[str, tuple[ActorHandle, ...]]
    """By hardware class."""
    learner: ActorHandle | None
    """None where nothing is trained: an evaluation beside a run."""
    queue: ActorHandle
    rollout_workers: tuple[ActorHandle, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    """Small plain data that goes with the actors: serving class of each class, store url, ..."""
    refresh_every: dict[str, int] = field(default_factory=dict)
    """By name of an engine: it loads only the versions that this divides; not named: every version."""

    def engines_loading(self, version: int) -> list[ActorHandle]:
        """Engines of all classes that load a version when it is published."""
        every = [engine for of_class in self.engines.values() for engine in of_class]
        return [engine for engine in every if version % self.refresh_every.get(engine.name, 1) == 0]

    def version_due(self, engine: ActorHandle, serving: int) -> int:
        """The version that an engine must hold at least while ``serving`` is in force."""
        return serving - serving % self.refresh_every.get(engine.name, 1)

    def handles(self) -> Iterator[ActorHandle]:
        """All of them."""
        for of_class in self.engines.values():
            yield from of_class
        if self.learner is not None:
            yield self.learner
        yield self.queue
        yield from self.rollout_workers


_cache: dict[tuple[str, str], tuple[float, RunActors]] = {}  # keyed by scheduler and run: runs never meet in it


def publish(client: Client, actors: RunActors, *, replace: bool = False) -> None:
    """Make the run's actors known to every process of the cluster.

    Args:
        replace: the run is already published by this driver, and an actor of it was rebuilt.

    Raises:
        InfrastructureFailure: a living run of this id is on the cluster already (two drivers resume one run).
    """
    link = find_link(scheduler_address(client))
    _sweep(client, link)
    if not replace and PREFIX + actors.run_id in _names(client):
        raise InfrastructureFailure(
            f"run {actors.run_id} is already running on the cluster at {link.scheduler_address}; "
            "wait for it to end, or choose another run id"
        )
    client.publish_dataset(actors, name=PREFIX + actors.run_id, override=True)
    _cache.pop((link.scheduler_address, actors.run_id), None)


def withdraw(client: Client, run_id: str) -> None:
    """Take the run's entry away; a run that has none is fine."""
    client.unpublish_dataset(PREFIX + run_id)
    _cache.pop((scheduler_address(client), run_id), None)


async def lookup(run_id: str, *, scheduler: str | None = None, max_age_s: float = MAX_AGE_S) -> RunActors:
    """The run's actors, from any event loop of any process of the cluster.

    Args:
        max_age_s: 0 after a call to an actor has failed: it may have been rebuilt elsewhere.

    Raises:
        InfrastructureFailure: the cluster knows no such run.
    """
    link = find_link(scheduler)
    fetching = _fetch(link, run_id, max_age_s)
    if asyncio.get_running_loop() is link.loop:
        return await fetching
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fetching, link.loop))


def lookup_sync(
    run_id: str, *, scheduler: str | None = None, max_age_s: float = MAX_AGE_S, timeout_s: float = LOOKUP_S
) -> RunActors:
    """`lookup` for threads without an event loop (stage tasks)."""
    link = find_link(scheduler)
    return _run(link, _fetch(link, run_id, max_age_s), f"lookup of run {run_id}", timeout_s)


async def _fetch(link: DaskLink, run_id: str, max_age_s: float) -> RunActors:
    key = (link.scheduler_address, run_id)
    now = time.monotonic()
    if key in _cache and now - _cache[key][0] <= max_age_s:
        return _cache[key][1]
    (found,) = await link.scheduler.publish_get(names=(PREFIX + run_id,))
    if found is None:
        _cache.pop(key, None)
        raise InfrastructureFailure(f"the cluster at {link.scheduler_address} knows no run {run_id}: it has ended")
    for stale in [each for each, (since, _) in _cache.items() if now - since > MAX_AGE_S]:
        del _cache[stale]
    _cache[key] = (now, found["data"])
    return found["data"]


def _sweep(client: Client, link: DaskLink) -> None:
    """Remove the entries of runs whose actors are all gone: their drivers were killed."""
    names: list[Any] = [name for name in _names(client) if name.startswith(PREFIX)]
    found: Any = client.get_dataset([*names]) if names else []
    for name, actors in zip(names, found, strict=True):
        if not _run(link, _any_lives(link, actors), f"sweep of {name}"):
            client.unpublish_dataset(name)


def _names(client: Client) -> list[str]:
    listed: Any = client.list_datasets()
    return [str(name) for name in listed]


async def _any_lives(link: DaskLink, actors: RunActors) -> bool:
    for handle in actors.handles():
        if await actor_lives(link, handle):
            return True
    return False


def _run(link: DaskLink, coroutine: Any, what: str, timeout_s: float = LOOKUP_S) -> Any:
    answer = asyncio.run_coroutine_threadsafe(coroutine, link.loop)
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        answer.cancel()
        raise DeadlineExceeded(f"{what}: no answer from {link.scheduler_address} within {timeout_s:g} s") from None
