"""Between proxies and one engine: a long poll that carries whatever is new, in both directions.

An actor call costs as much as a decode step of a small policy, so a call per turn would double the cost. A proxy keeps
one waiting `exchange` open and sends new requests beside it, in calls that return at once.

| who waits             | for what                                     | unblocked by                              |
|-----------------------|----------------------------------------------|-------------------------------------------|
| a request's task      | its generation                               | the engine (every request is answered)    |
| a long poll           | the first generation of its proxy's requests | a request's task, or ``wait_s``           |
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from resources.engines.base import Engine, GenerateRequest, Generation
from resources.failures import EngineFailure


class HostedEngine(Engine, Protocol):
    """What an exchange needs to know of an engine, beside the protocol."""

    @property
    def name(self) -> str: ...
    @property
    def hardware_class(self) -> str: ...
    @property
    def version(self) -> int:
        """Policy version under which the next token is sampled."""
        ...

    @property
    def suspended(self) -> bool: ...
    @property
    def num_free(self) -> int:
        """Requests that could start at once; negative when some wait already."""
        ...

    @property
    def failure(self) -> str | None:
        """Why no request can be answered any more; None while the engine lives."""
        ...


@dataclass(frozen=True, slots=True)
class ExchangeReply:
    finished: list[Generation]
    """Each generation is handed over exactly once."""
    credits: int
    """Requests that the engine could start at once (0 when it is full)."""
    version: int
    suspended: bool


@dataclass(slots=True)
class _Mailbox:
    """One proxy's side: requests on their way, and generations not collected yet."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    finished: list[Generation] = field(default_factory=list)
    arrival: asyncio.Event = field(default_factory=asyncio.Event)


class Exchange:
    """Lives on one event loop."""

    def __init__(self, engine: HostedEngine) -> None:
        self._engine = engine
        self._mailboxes: dict[str, _Mailbox] = {}

    async def exchange(
        self,
        proxy_id: str,
        requests: list[GenerateRequest],
        aborts: list[str],
        releases: list[str],
        wait_s: float,
    ) -> ExchangeReply:
        """Take up what is new; with ``wait_s`` > 0 wait up to that long for generations of this proxy and return them.

        A request that the engine fails on comes back as a generation with ``error`` set. Raises EngineFailure when the
        engine is dead and nothing of this proxy is left to hand over.
        """
        mailbox = self._mailboxes.setdefault(proxy_id, _Mailbox())
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._generate(mailbox, request))
            mailbox.tasks.add(task)
            task.add_done_callback(mailbox.tasks.discard)
        if requests:
            # Let the tasks reach the engine, before an abort of one of them, and before its free slots are counted.
            await asyncio.sleep(0)
        for request_id in aborts:
            await self._engine.abort(request_id)
        for trajectory_id in releases:
            await self._engine.release(trajectory_id)
        if self._engine.failure is not None and not mailbox.finished and all(task.done() for task in mailbox.tasks):
            raise EngineFailure(self._engine.failure)
        finished = await self._collect(mailbox, wait_s) if wait_s > 0 else []
        engine = self._engine
        return ExchangeReply(finished, max(0, engine.num_free), engine.version, engine.suspended)

    async def _collect(self, mailbox: _Mailbox, wait_s: float) -> list[Generation]:
        if not mailbox.finished:
            mailbox.arrival.clear()
            try:
                await asyncio.wait_for(mailbox.arrival.wait(), wait_s)
            except TimeoutError:
                return []
        finished, mailbox.finished = mailbox.finished, []
        return finished

    async def _generate(self, mailbox: _Mailbox, request: GenerateRequest) -> None:
        try:
            generation = await self._engine.generate(request)
        except Exception as error:  # noqa: BLE001 - a request whose answer got lost would be waited for for ever
            message = str(error) if isinstance(error, EngineFailure) else f"{type(error).__name__}: {error}"
            generation = _failed(self._engine, request, message)
        mailbox.finished.append(generation)
        mailbox.arrival.set()


def _failed(engine: HostedEngine, request: GenerateRequest, message: str) -> Generation:
    return Generation(
        request_id=request.request_id,
        trajectory_id=request.trajectory_id,
        token_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        versions=np.empty(0, dtype=np.int32),
        finish_reason="abort",
        engine=engine.name,
        hardware_class=engine.hardware_class,
        error=message,
    )
