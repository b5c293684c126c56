"""One proxy's connection to one engine: a waiting long poll, and submits beside it.

| who waits        | for what                                  | unblocked by                                          |
|------------------|-------------------------------------------|-------------------------------------------------------|
| a request        | its generation                            | the long poll that brings it, or the link's failure   |
| the long poll    | a finished generation of this proxy       | the engine, ``poll_s``, or ``exchange_deadline_s``    |

Requests of one loop tick travel together. A request that arrives while no poll is out rides on the next one;
otherwise it is sent at once beside it, or the first turn of a quiet engine would wait for the poll to return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from resources.engines.base import GenerateRequest, Generation
from resources.failures import EngineFailure

Call = Callable[..., Awaitable[Any]]
"""``call(actor, method, *arguments)``: one method of an actor, awaited."""

GATHER_TICKS = 3
"""Loop ticks between two polls: environments that answer at once put their next requests on the next poll."""
RELEASE_AFTER_S = 0.02
"""Releases are not urgent: they wait this long for something to travel with, in seconds."""


class EngineLost(EngineFailure):
    """A request was given up on one engine; another one may take it."""


@dataclass(slots=True)
class LinkStats:
    num_exchanges: int = 0
    num_requests: int = 0
    num_generations: int = 0
    num_unknown: int = 0
    """Generations that nobody waits for any more (aborted, re-routed)."""
    num_refused: int = 0
    """Generations that claimed a version which the engine does not hold."""
    num_failures: int = 0


class EngineLink:
    """Lives on one event loop. ``on_change`` is called when the link fails, so that waiting requests look again."""

    def __init__(
        self,
        name: str,
        hardware_class: str,
        actor: Any,
        proxy_id: str,
        call: Call,
        *,
        poll_s: float,
        exchange_deadline_s: float,
        cooldown_s: float,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.hardware_class, self.actor = name, hardware_class, actor
        self.stats = LinkStats()
        self.suspended = False
        self.version: int | None = None
        self.last_error = ""
        self._proxy_id, self._call = proxy_id, call
        self._poll_s, self._exchange_deadline_s, self._cooldown_s = poll_s, exchange_deadline_s, cooldown_s
        self._clock, self._on_change = clock, on_change
        self._flights: dict[str, asyncio.Future[Generation]] = {}
        self._requests: list[GenerateRequest] = []
        self._aborts: list[str] = []
        self._releases: list[str] = []
        self._credits = 1
        self._failed_until = 0.0
        self._poll: asyncio.Task[None] | None = None
        self._poll_will_carry = False
        self._sends: set[asyncio.Task[bool]] = set()
        self._flush_soon: asyncio.Handle | None = None
        self._closed = False

    @property
    def usable(self) -> bool:
        """False for a while after a failure, then it may be tried again."""
        return not self._closed and self._clock() >= self._failed_until

    @property
    def retry_in_s(self) -> float:
        return max(0.0, self._failed_until - self._clock())

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def num_free(self) -> int:
        """Requests that the engine could start at once, as far as this proxy knows; may be negative."""
        return self._credits

    def submit(self, request: GenerateRequest) -> asyncio.Future[Generation]:
        """Send a request; the future fails with EngineLost when this engine will not answer it."""
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._flights[request.request_id] = future
        self._requests.append(request)
        self._credits -= 1
        self.stats.num_requests += 1
        self._flush_in(0.0)
        return future

    def abort(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        if self._flights.pop(request_id, None) is None:
            return
        unsent = [request for request in self._requests if request.request_id == request_id]
        if unsent:
            self._requests.remove(unsent[0])
        else:
            self._aborts.append(request_id)
            self._flush_in(0.0)

    def release(self, trajectory_id: str) -> None:
        """The engine need not keep this trajectory's KV any more."""
        if self.usable:
            self._releases.append(trajectory_id)
            self._flush_in(RELEASE_AFTER_S)

    async def close(self) -> None:
        """Give up what is in flight, tell the engine, and end."""
        self._aborts += self._flights
        self._requests = []
        self._end_flights(f"the proxy's link to engine {self.name} was closed")
        if self._flush_soon is not None:
            self._flush_soon.cancel()
        if (self._aborts or self._releases) and self.usable:
            await self._exchange(0.0)
        self._closed = True
        tasks = [*self._sends, *([self._poll] if self._poll else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _flush_in(self, delay_s: float) -> None:
        if self._flush_soon is not None:
            if delay_s > 0 or not isinstance(self._flush_soon, asyncio.TimerHandle):
                return
            self._flush_soon.cancel()
        loop = asyncio.get_running_loop()
        self._flush_soon = loop.call_later(delay_s, self._flush) if delay_s > 0 else loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_soon = None
        if self._closed or self._poll_will_carry or not self._has_news():
            return
        loop = asyncio.get_running_loop()
        if self._poll is None:
            self._poll = loop.create_task(self._run_poll())
        else:
            send = loop.create_task(self._exchange(0.0))
            self._sends.add(send)
            send.add_done_callback(self._sends.discard)

    def _has_news(self) -> bool:
        return bool(self._requests or self._aborts or self._releases)

    async def _run_poll(self) -> None:
        try:
            while self._flights or self._has_news():
                self._poll_will_carry = False
                if not await self._exchange(self._poll_s if self._flights else 0.0):
                    return
                self._poll_will_carry = True
                for _ in range(GATHER_TICKS):
                    await asyncio.sleep(0)
        finally:
            self._poll_will_carry = False
            self._poll = None
            if self._has_news() and self.usable:  # else: kept until a request comes, once it may be tried again
                self._flush_in(0.0)

    async def _exchange(self, wait_s: float) -> bool:
        """One call; False when it failed (then every request in flight was given up)."""
        requests, self._requests = self._requests, []
        aborts, self._aborts = self._aborts, []
        releases, self._releases = self._releases, []
        self.stats.num_exchanges += 1
        limit_s = wait_s + self._exchange_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._call(self.actor, "exchange", self._proxy_id, requests, aborts, releases, wait_s)
        except TimeoutError:
            self._fail(f"no answer to an exchange within {limit_s:g} s")
            return False
        except Exception as error:  # noqa: BLE001 - whatever it was, this engine cannot be reached now; others may be
            self._fail(f"{type(error).__name__}: {error}")
            return False
        self.suspended, self.version = reply.suspended, reply.version
        self._credits = reply.credits - len(self._requests)
        for generation in reply.finished:
            future = self._flights.pop(generation.request_id, None)
            if future is None or future.done():
                self.stats.num_unknown += 1
            elif (problem := version_problem(generation, reply.version)) is not None:
                self.stats.num_refused += 1
                self.last_error = f"engine {self.name}: {problem}"
                future.set_exception(EngineLost(self.last_error))
            else:
                self.stats.num_generations += 1
                future.set_result(generation)
        return True

    def _fail(self, message: str) -> None:
        self.last_error = message
        self.stats.num_failures += 1
        self._failed_until = self._clock() + self._cooldown_s
        # Should the engine come back, it is to stop working for nobody.
        self._aborts = list(self._flights)
        self._requests, self._releases = [], []
        self._end_flights(f"engine {self.name} failed: {message}")
        self._on_change()

    def _end_flights(self, message: str) -> None:
        flights, self._flights = self._flights, {}
        for future in flights.values():
            if not future.done():
                future.set_exception(EngineLost(message))
                future.exception()  # a waiter that was cancelled meanwhile must not turn this into a warning


def version_problem(generation: Generation, held: int) -> str | None:
    """What is wrong with the versions of an answer from an engine that holds ``held`` now; None: nothing.

    Versions only rise, so none of its tokens can be newer than that. A row must never claim a version that was not
    loaded: the staleness bound, and every importance ratio, rest on what rows say.
    """
    versions = generation.versions
    if not len(versions):
        return None
    oldest, newest = int(versions.min()), int(versions.max())
    if oldest >= 0 and newest <= held and bool((versions[1:] >= versions[:-1]).all()):
        return None
    return (
        f"its answer to {generation.request_id} claims versions {oldest} to {newest}, but it holds version {held}: "
        "the tokens are refused"
    )
