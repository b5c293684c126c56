"""The LLM proxy of one rollout worker: which engine generates for a trajectory, and what if it is lost?

Routing (routing.py): task family -> hardware class -> the engine that holds the trajectory's prefix, else the one with
most free capacity (in a deterministic run: the one that its group's name implies). A class without a usable engine is
served by its declared fallback classes, in order; every use is counted. A request whose engine fails goes to another
one with the tokens already sampled (continuation.py).

With cross-policy sampling a request says whether it is a stale engine's. One that is goes to a current engine when no
stale one is usable (counted). An engine computes what it does not hold of a history, so a change of engines is exact.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resources.engines.base import GenerateRequest, Generation
from resources.failures import EngineFailure
from resources.rollout.config import RolloutConfig
from resources.rollout.continuation import join_parts, remainder_of
from resources.rollout.engine_link import Call, EngineLink, EngineLost
from resources.rollout.routing import Routing

WATCH_PERIOD_S = 1.0


@dataclass(slots=True)
class _Watched:
    """A request in flight; seconds since it was sent, in all and without the engine's suspensions."""

    link: EngineLink
    request_id: str
    future: asyncio.Future[Generation]
    waited_s: float = 0.0
    active_s: float = 0.0


class LLMProxy:
    """Lives on one event loop; see the module. Every wait in `generate` ends at a deadline of the configuration."""

    def __init__(
        self,
        proxy_id: str,
        engines: Mapping[str, Sequence[tuple[str, Any]]],
        config: RolloutConfig,
        *,
        call: Call,
        fallback: Mapping[str, Sequence[str]] | None = None,
        stale_engines: Collection[str] = (),
        log: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            proxy_id: distinct among all proxies that the engines ever meet.
            engines: by hardware class, (name, actor).
            fallback: compatible classes of a class, in order.
            stale_engines: names of those that only requests with ``policy`` "stale" may reach.
            log: takes one line for people.
        """
        self._proxy_id, self._config, self._call, self._log, self._clock = proxy_id, config, call, log, clock
        self._routing = Routing(fallback or {}, stale_engines, is_deterministic=config.deterministic)
        self._watched: dict[str, _Watched] = {}
        self._watching: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._fallbacks: Counter[tuple[str, str]] = Counter()
        self._num_rerouted = self._num_rescued_tokens = self._num_stale_unserved = 0
        self._suspects: set[str] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self.set_engines(engines)

    def set_engines(self, engines: Mapping[str, Sequence[tuple[str, Any]]]) -> None:
        """Use these engines from now on. Links to those that stay (same name and actor) are kept; requests on the
        others go to another engine."""
        kept = {(link.hardware_class, link.name): link for link in self._routing}
        links: dict[str, list[EngineLink]] = {}
        for hardware_class, members in engines.items():
            links[hardware_class] = []
            for name, actor in members:
                link = kept.get((hardware_class, name))
                if link is None or link.actor != actor:  # a handle that travelled is equal, never the same object
                    link = self._open_link(name, hardware_class, actor)
                else:
                    del kept[hardware_class, name]
                links[hardware_class].append(link)
        self._routing.links = links
        for link in kept.values():
            retiring = asyncio.get_running_loop().create_task(link.close())
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
        self._announce()

    async def generate(self, request: GenerateRequest, hardware_class: str) -> Generation:
        """Complete one request on an engine of the class, or of its fallbacks.

        Raises EngineFailure when ``max_engine_attempts`` engines failed on it, or none was usable for
        ``engine_wait_s``. Cancelling it aborts the request on its engine.
        """
        parts: list[Generation] = []
        errors: list[str] = []
        tried: list[EngineLink] = []
        for attempt in range(self._config.max_engine_attempts):
            remainder = remainder_of(request, parts, attempt)
            if remainder is None:
                return join_parts(request, parts, "length")
            link = await self._pick(hardware_class, request, tried)
            tried.append(link)
            try:
                generation = await self._send(link, remainder)
            except EngineLost as error:
                errors.append(str(error))
            else:
                if self._routing.is_stale(link):
                    generation = dataclasses.replace(generation, stale_tokens=len(generation.token_ids))
                parts.append(generation)
                if generation.error is None and generation.finish_reason != "abort":
                    return join_parts(request, parts, generation.finish_reason) if attempt else dataclasses.replace(
                        generation, request_id=request.request_id
                    )  # fmt: skip
                errors.append(f"engine {link.name}: {generation.error or 'aborted the request'}")
                self._num_rescued_tokens += len(generation.token_ids)
            self._suspects.add(link.name)
            self._routing.leave(request.trajectory_id, link)
            self._num_rerouted += 1
        raise EngineFailure(
            f"{len(errors)} engines failed on a request of {request.trajectory_id}: {'; '.join(errors)}"
        )

    def release(self, trajectory_id: str) -> None:
        """The trajectory is over: its engines need not keep its KV."""
        self._routing.forget(trajectory_id)

    def engine_of(self, trajectory_id: str) -> str:
        """Name of the engine that generates, or last did, for the trajectory; empty while it has none."""
        homes = self._routing.homes(trajectory_id)
        return homes[-1].name if homes else ""

    def take_suspects(self) -> list[str]:
        """Engines that failed on a request since the last call: a supervisor is to find out whether they still live."""
        suspects, self._suspects = sorted(self._suspects), set()
        return suspects

    def stats(self) -> dict[str, Any]:
        return {
            "num_fallbacks": {f"{wanted}->{used}": number for (wanted, used), number in self._fallbacks.items()},
            "num_rerouted": self._num_rerouted,
            "num_rescued_tokens": self._num_rescued_tokens,
            "num_stale_unserved": self._num_stale_unserved,
            "engines": {
                link.name: {
                    **dataclasses.asdict(link.stats),
                    "in_flight": link.num_in_flight,
                    "usable": link.usable,
                    "last_error": link.last_error,
                }
                for link in self._routing
            },
        }

    async def close(self) -> None:
        """End every link; requests in flight fail with EngineFailure."""
        if self._watching is not None:
            self._watching.cancel()
        closing = [link.close() for link in self._routing]
        self._routing.links = {}
        await asyncio.gather(*closing, *self._retiring)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open_link(self, name: str, hardware_class: str, actor: Any) -> EngineLink:
        return EngineLink(
            name,
            hardware_class,
            actor,
            self._proxy_id,
            self._call,
            poll_s=self._config.engine_poll_s,
            exchange_deadline_s=self._config.exchange_deadline_s,
            cooldown_s=self._config.engine_cooldown_s,
            clock=self._clock,
            on_change=self._announce,
        )

    async def _send(self, link: EngineLink, request: GenerateRequest) -> Generation:
        self._routing.settle(request.trajectory_id, link)
        future = link.submit(request)
        self._watched[request.request_id] = _Watched(link, request.request_id, future)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        try:
            return await future
        except asyncio.CancelledError:
            link.abort(request.request_id)
            raise
        finally:
            del self._watched[request.request_id]

    async def _pick(self, hardware_class: str, request: GenerateRequest, tried: list[EngineLink]) -> EngineLink:
        if request.policy == "stale":
            stale = self._routing.stale(hardware_class, request.trajectory_id, tried)
            if stale is not None:
                return stale
            if all(map(self._routing.is_stale, tried)):
                self._count_unserved(hardware_class)
        give_up_at = self._clock() + self._config.engine_wait_s
        while True:
            link = self._routing.current(hardware_class, request.trajectory_id, tried)
            if link is not None:
                if link.hardware_class != hardware_class:
                    self._count_fallback(hardware_class, link.hardware_class)
                return link
            remaining = give_up_at - self._clock()
            if remaining <= 0:
                raise EngineFailure(self._nobody(hardware_class))
            retry_in = [link.retry_in_s for link in self._routing.candidates(hardware_class)]
            changed = self._changed
            try:
                async with asyncio.timeout(min(remaining, max(0.01, min(retry_in, default=remaining)))):
                    await changed.wait()
            except TimeoutError:
                continue

    def _nobody(self, hardware_class: str) -> str:
        candidates = self._routing.candidates(hardware_class)
        known = ", ".join(f"{link.name} ({link.last_error or 'closed'})" for link in candidates) or "none registered"
        return (
            f"no engine of class {hardware_class!r} or its fallbacks {self._routing.fallback_of(hardware_class)} "
            f"was usable for {self._config.engine_wait_s:g} s: {known}"
        )

    def _count_fallback(self, wanted: str, used: str) -> None:
        if not self._fallbacks[wanted, used]:
            self._log(f"no usable engine of class {wanted!r}: its requests go to the fallback class {used!r}")
        self._fallbacks[wanted, used] += 1

    def _count_unserved(self, hardware_class: str) -> None:
        if not self._num_stale_unserved:
            self._log(f"no usable stale engine of class {hardware_class!r}: its turns go to current engines")
        self._num_stale_unserved += 1

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self) -> None:
        """One timer for all requests in flight, instead of one each."""
        while self._watched:
            await asyncio.sleep(WATCH_PERIOD_S)
            self.age_requests(WATCH_PERIOD_S)

    def age_requests(self, seconds: float) -> None:
        """Let time pass for what is in flight; a suspended engine's requests only age towards ``suspend_limit_s``."""
        limit_s = self._config.generate_deadline_s
        for watched in list(self._watched.values()):
            watched.waited_s += seconds
            watched.active_s += 0.0 if watched.link.suspended else seconds
            if watched.active_s < limit_s and watched.waited_s < limit_s + self._config.suspend_limit_s:
                continue
            watched.link.abort(watched.request_id)
            if not watched.future.done():
                watched.future.set_exception(
                    EngineLost(
                        f"engine {watched.link.name} did not finish within {watched.active_s:.0f} s"
                        f" ({watched.waited_s:.0f} s with suspensions)"
                    )
                )
