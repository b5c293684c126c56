"""Environments of one class that can step together: the steps that come at once become one call over all of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from resources.environments.base import StepOutcome
from resources.environments.threads import DaemonThreads
from resources.failures import EnvironmentFailure


@runtime_checkable
class VectorEnvironment(Protocol):
    """What an environment class may offer beside `Environment`, for batch stepping."""

    @classmethod
    def step_many(
        cls, environments: Sequence[Self], actions: Sequence[str]
    ) -> list[StepOutcome] | Awaitable[list[StepOutcome]]:
        """One step of each, outcomes in order; exactly what `step` of each would give. May be a coroutine."""
        ...


@dataclass(slots=True)
class _Pending:
    environments: list[Any] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    answers: list[asyncio.Future[StepOutcome]] = field(default_factory=list)


class StepTogether:
    """Gathers the steps of one tick of the event loop, by class. Lives on one loop."""

    def __init__(self, threads: DaemonThreads | None = None) -> None:
        """``threads`` runs a ``step_many`` that is no coroutine."""
        self.num_calls = self.num_steps = 0
        self._threads = threads or DaemonThreads(4)
        self._pending: dict[type, _Pending] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def step_of(self, environment: Any) -> Callable[[str], Awaitable[StepOutcome]] | None:
        """Its ``step``, taken together with others'; None when its class does not offer that."""
        if not isinstance(environment, VectorEnvironment):
            return None

        async def step(action: str) -> StepOutcome:
            return await self._step(environment, action)

        return step

    async def _step(self, environment: Any, action: str) -> StepOutcome:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[StepOutcome] = loop.create_future()
        pending = self._pending.get(type(environment))
        if pending is None:
            pending = self._pending[type(environment)] = _Pending()
            loop.call_soon(self._flush, type(environment))
        pending.environments.append(environment)
        pending.actions.append(action)
        pending.answers.append(answer)
        return await answer

    def _flush(self, cls: type) -> None:
        call = asyncio.get_running_loop().create_task(self._call(cls, self._pending.pop(cls)))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, cls: Any, pending: _Pending) -> None:
        self.num_calls += 1
        self.num_steps += len(pending.actions)
        try:
            outcomes = await self._outcomes(cls, pending)
            if len(outcomes) != len(pending.actions):
                raise EnvironmentFailure(
                    f"{cls.__name__}.step_many gave {len(outcomes)} outcomes for {len(pending.actions)} environments"
                )
        except Exception as error:  # noqa: BLE001 - a user's code; each of the steps fails with it
            for answer in pending.answers:
                if not answer.done():  # one that was cancelled, or missed its deadline, waits no more
                    answer.set_exception(error)
            return
        for answer, outcome in zip(pending.answers, outcomes, strict=True):
            if not answer.done():
                answer.set_result(outcome)

    async def _outcomes(self, cls: Any, pending: _Pending) -> list[StepOutcome]:
        if inspect.iscoroutinefunction(cls.step_many):
            return await cls.step_many(pending.environments, pending.actions)
        call = self._threads.submit(lambda: cls.step_many(pending.environments, pending.actions))
        return await asyncio.wrap_future(call)
