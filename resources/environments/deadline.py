"""What if an environment hangs, raises or answers nonsense? A wrapper that turns each into an `EnvironmentFailure`.

It also makes the protocol easy to meet: plain ``def`` methods run in threads, ``close`` and ``judgement`` may be left
out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
import random
from collections.abc import Awaitable, Callable
from typing import Any

from resources.environments.base import Message, ScriptedExpert, StepOutcome
from resources.environments.threads import DaemonThreads
from resources.failures import EnvironmentFailure, RollartError
from resources.rewards.checked import HIGHEST_REWARD, is_reward

CALL_SEPARATOR = " in "
"""In the name of a task that runs an environment's coroutine: behind the name of the task that waits for it."""
_ROLES = ("system", "user", "assistant", "tool")


class DeadlineEnvironment:
    """An environment whose calls end: with a valid answer, or with an EnvironmentFailure that names family, call and
    seconds.

    A coroutine that misses its deadline is cancelled. A blocking call cannot be: its thread is left to it, and the
    environment's own ``close`` follows when it does return. An environment that has failed is to be closed, not stepped
    on.
    """

    def __init__(
        self,
        inner: Any,
        *,
        family: str,
        reset_deadline_s: float,
        step_deadline_s: float,
        threads: DaemonThreads,
        step: Callable[[str], Awaitable[StepOutcome]] | None = None,
    ) -> None:
        """``step`` stands in for the environment's own (see `StepTogether`)."""
        self.inner = inner
        self._step = step or inner.step
        self.env_version: str = inner.env_version
        self.max_turns: int = inner.max_turns
        self._family = family
        self._reset_deadline_s, self._step_deadline_s = reset_deadline_s, step_deadline_s
        self._threads = threads
        self._hung: concurrent.futures.Future[Any] | None = None

    async def reset(self, seed: int) -> list[Message]:
        messages = await self._call("reset", self._reset_deadline_s, self.inner.reset, seed)
        self._check_messages("reset", messages)
        if not messages:
            raise EnvironmentFailure(f"{self._family}: reset returned no message; the policy needs one to answer")
        return messages

    async def step(self, action: str) -> StepOutcome:
        outcome = await self._call("step", self._step_deadline_s, self._step, action)
        if not isinstance(outcome, StepOutcome):
            raise EnvironmentFailure(f"{self._family}: step returned {type(outcome).__name__}, not StepOutcome")
        self._check_messages("step", outcome.observation)
        if not (outcome.observation or outcome.terminated or outcome.truncated):
            raise EnvironmentFailure(f"{self._family}: step returned no observation, but the episode is not over")
        return self._plain(outcome)

    async def close(self) -> None:
        """Close the environment within the step's deadline; after a call that hangs, when that call returns."""
        close = getattr(self.inner, "close", None)
        if close is None:
            return
        if self._hung is not None and not self._hung.done():
            if not inspect.iscoroutinefunction(close):
                # Nobody waits for it then: should it hang as well, its thread counts as lost.
                self._hung.add_done_callback(lambda _: self._threads.abandon(self._threads.submit(close)))
            return
        await self._call("close", self._step_deadline_s, close)

    async def judgement(self) -> dict[str, Any] | None:
        """What the environment gives a scorer, within the step's deadline; None without a ``judgement``."""
        judgement = getattr(self.inner, "judgement", None)
        if judgement is None:
            return None
        payload = await self._call("judgement", self._step_deadline_s, judgement)
        if payload is not None and not isinstance(payload, dict):
            raise EnvironmentFailure(
                f"{self._family}: judgement returned {type(payload).__name__}; it must be a dict for the scorer, or "
                "None"
            )
        return payload

    async def _call(self, name: str, deadline_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        future, in_thread = self._start(name, function, arguments)
        try:
            done, _ = await asyncio.wait({future}, timeout=deadline_s)
        except asyncio.CancelledError:
            self._abandon(future, in_thread)
            raise
        if not done:
            busy = self._threads.num_unfinished
            self._abandon(future, in_thread)
            waited = "" if in_thread is None else f" ({busy} calls on {self._threads.num_threads} threads)"
            raise EnvironmentFailure(f"{self._family}: {name} did not return within {deadline_s:g} s{waited}")
        try:
            return future.result()
        except RollartError:
            raise  # it names its boundary already
        except Exception as error:
            raise EnvironmentFailure(f"{self._family}: {name} raised {type(error).__name__}: {error}") from error
        except asyncio.CancelledError as error:  # by the environment's own doing: nobody cancelled this call
            raise EnvironmentFailure(f"{self._family}: {name} was cancelled from inside") from error

    def _start(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> tuple[asyncio.Future[Any], concurrent.futures.Future[Any] | None]:
        """The call as something to await, and for a blocking one the call in its thread."""
        if inspect.iscoroutinefunction(function):
            running = asyncio.get_running_loop().create_task(function(*arguments), name=self._task_name(name))
            return running, None
        in_thread = self._threads.submit(lambda: function(*arguments))
        return asyncio.wrap_future(in_thread), in_thread

    def _task_name(self, call: str) -> str:
        """Should the call block the event loop, this is how people learn whose it was."""
        current = asyncio.current_task()
        on_behalf_of = current.get_name() if current is not None else "?"
        return f"{on_behalf_of}{CALL_SEPARATOR}{call} of the environment of {self._family!r}"

    def _abandon(self, future: asyncio.Future[Any], in_thread: concurrent.futures.Future[Any] | None) -> None:
        # Its late error is nobody's news, and asyncio must not report it as forgotten.
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if in_thread is not None and not in_thread.cancel():  # one that has not begun never will
            self._hung = in_thread
            self._threads.abandon(in_thread)
        future.cancel()

    def _plain(self, outcome: StepOutcome) -> StepOutcome:
        """The same with Python's own numbers: numpy's, which many environments give, are no JSON further on."""
        try:
            reward = float(outcome.reward)
            components = {str(name): float(value) for name, value in outcome.components.items()}
        except (TypeError, ValueError) as error:
            raise EnvironmentFailure(
                f"{self._family}: step gave reward {outcome.reward!r} with components {outcome.components!r}; they "
                "must be numbers"
            ) from error
        for name, value in [("reward", reward), *components.items()]:
            if not is_reward(value):
                raise EnvironmentFailure(
                    f"{self._family}: step gave {name} {value}; it must be finite, at most {HIGHEST_REWARD:g} in size"
                )
        return dataclasses.replace(
            outcome,
            reward=reward,
            components=components,
            terminated=bool(outcome.terminated),
            truncated=bool(outcome.truncated),
            success=None if outcome.success is None else bool(outcome.success),
            invalid_action=bool(outcome.invalid_action),
        )

    def _check_messages(self, name: str, messages: Any) -> None:
        if not isinstance(messages, list):
            raise EnvironmentFailure(f"{self._family}: {name} gave {type(messages).__name__}, not a list of messages")
        for message in messages:
            if not (
                isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str)
            ):
                raise EnvironmentFailure(
                    f"{self._family}: {name} gave the message {message!r}; it must be "
                    f"{{'role': one of {', '.join(_ROLES)}, 'content': a string}}"
                )


class DeadlineExpertEnvironment(DeadlineEnvironment):
    """The same around an environment that offers a scripted expert."""

    inner: ScriptedExpert

    def expert_action(self) -> str:
        return self.inner.expert_action()

    def random_action(self, rng: random.Random) -> str:
        return self.inner.random_action(rng)
