"""Environments that hang, raise or answer nonsense become failures that say who, what and how long."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from resources.environments.base import Message, StepOutcome
from resources.environments.deadline import DeadlineEnvironment
from resources.environments.threads import DaemonThreads
from resources.failures import EnvironmentFailure, FailureClass, InfrastructureFailure

OPENING = [Message(role="user", content="hello")]


class Scripted:
    """Answers with what it was given."""

    env_version = "1"
    max_turns = 3

    def __init__(self, opening: Any = OPENING, outcome: Any = None) -> None:
        self.opening, self.outcome = opening, outcome

    async def reset(self, seed: int) -> Any:
        return self.opening

    async def step(self, action: str) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class Hanging:
    """A coroutine that never ends, not even when it is cancelled the first time."""

    env_version = "1"
    max_turns = 3

    def __init__(self, ignores_cancellation: bool) -> None:
        self.ignores_cancellation = ignores_cancellation
        self.release = asyncio.Event()
        self.cancelled = False

    async def reset(self, seed: int) -> Any:
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled = True
                if not self.ignores_cancellation:
                    raise

    async def step(self, action: str) -> Any: ...

    async def close(self) -> None: ...


class Blocking:
    """Plain methods; ``step`` waits for a gate."""

    env_version = "1"
    max_turns = 3

    def __init__(self) -> None:
        self.gate, self.closed = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def reset(self, seed: int) -> list[Message]:
        self.threads.append(threading.current_thread().name)
        return OPENING

    def step(self, action: str) -> StepOutcome:
        assert self.gate.wait(30)
        return StepOutcome([], terminated=True)

    def close(self) -> None:
        self.closed.set()


def wrap(
    inner: Any, *, deadline_s: float = 20.0, reset_deadline_s: float | None = None, threads: DaemonThreads | None = None
) -> DeadlineEnvironment:
    return DeadlineEnvironment(
        inner,
        family="mine",
        reset_deadline_s=reset_deadline_s or deadline_s,
        step_deadline_s=deadline_s,
        threads=threads or DaemonThreads(2),
    )


def failure_of(call: Callable[[], Any]) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as caught:
        asyncio.run(call())
    assert caught.value.failure_class is FailureClass.ENVIRONMENT
    return caught.value


@pytest.mark.parametrize("ignores_cancellation", [False, True])
def test_a_coroutine_that_hangs_is_cancelled_and_left(ignores_cancellation: bool) -> None:
    async def main() -> None:
        inner = Hanging(ignores_cancellation)
        with pytest.raises(EnvironmentFailure, match=r"mine: reset did not return within 0.05 s"):
            await wrap(inner, deadline_s=0.05).reset(0)
        await asyncio.sleep(0)
        assert inner.cancelled
        inner.release.set()

    asyncio.run(main())


def test_cancelling_the_caller_cancels_the_call() -> None:
    async def main() -> None:
        inner = Hanging(ignores_cancellation=False)
        call = asyncio.create_task(wrap(inner).reset(0))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)
        assert inner.cancelled

    asyncio.run(main())


def test_a_blocking_call_that_hangs_keeps_its_thread_and_nothing_else() -> None:
    """The loop goes on, another environment is served, and `close` follows when the call returns."""

    async def main() -> None:
        threads = DaemonThreads(2)
        hanging, other = Blocking(), Blocking()
        other.gate.set()
        environment = wrap(hanging, deadline_s=0.05, threads=threads)
        assert await environment.reset(0) == OPENING
        with pytest.raises(
            EnvironmentFailure, match=r"mine: step did not return within 0.05 s \(1 calls on 2 threads\)"
        ):
            await environment.step("x")
        await environment.close()
        assert not hanging.closed.is_set()
        assert (await wrap(other, threads=threads).step("x")).terminated
        hanging.gate.set()
        assert await asyncio.to_thread(hanging.closed.wait, 20)

    asyncio.run(main())


def test_a_blocking_judgement_has_the_step_s_deadline_and_leaves_the_loop_alone() -> None:
    class Judging(Blocking):
        def judgement(self) -> dict[str, Any]:
            self.threads.append(threading.current_thread().name)
            assert self.gate.wait(30)
            return {"answer": "4"}

    async def main() -> None:
        threads, inner = DaemonThreads(2), Judging()
        with pytest.raises(EnvironmentFailure, match=r"mine: judgement did not return within 0.05 s"):
            await wrap(inner, deadline_s=0.05, reset_deadline_s=20.0, threads=threads).judgement()
        assert threads.num_abandoned == 1 and inner.threads != [threading.current_thread().name]
        inner.gate.set()
        assert await wrap(inner, threads=threads).judgement() == {"answer": "4"}

    asyncio.run(main())


@pytest.mark.parametrize(
    "payload, told",
    [
        (["4"], r"mine: judgement returned list; it must be a dict"),
        (KeyError("answer"), r"mine: judgement raised KeyError: 'answer'"),
    ],
)
def test_a_judgement_that_no_scorer_could_read_is_a_failure(payload: Any, told: str) -> None:
    class Judging(Scripted):
        async def judgement(self) -> Any:
            if isinstance(payload, Exception):
                raise payload
            return payload

    assert re.match(told, str(failure_of(wrap(Judging()).judgement)))


class BlockingInClose(Blocking):
    def close(self) -> None:
        self.closed.set()
        assert self.gate.wait(30)


def test_a_close_that_hangs_is_abandoned_and_its_thread_counts_as_lost() -> None:
    async def main() -> None:
        threads, inner = DaemonThreads(2), BlockingInClose()
        with pytest.raises(EnvironmentFailure, match=r"mine: close did not return within 0.05 s"):
            await wrap(inner, deadline_s=0.05, threads=threads).close()
        assert threads.num_abandoned == 1
        inner.gate.set()

    asyncio.run(main())


def test_a_close_behind_a_call_that_hung_counts_as_lost_while_it_runs() -> None:
    class Both(BlockingInClose):
        def __init__(self) -> None:
            super().__init__()
            self.step_gate = threading.Event()

        def step(self, action: str) -> StepOutcome:
            assert self.step_gate.wait(30)
            return StepOutcome([], terminated=True)

    async def main() -> None:
        threads, inner = DaemonThreads(2), Both()
        environment = wrap(inner, deadline_s=0.05, threads=threads)
        with pytest.raises(EnvironmentFailure, match="step did not return"):
            await environment.step("x")
        await environment.close()
        inner.step_gate.set()
        assert await asyncio.to_thread(inner.closed.wait, 20)
        while threads.num_abandoned != 1:  # the step has come back, the close has not
            await asyncio.sleep(0.001)
        inner.gate.set()
        while threads.num_abandoned:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_blocking_environments_never_run_on_the_loops_thread_and_their_number_is_bounded() -> None:
    async def main() -> None:
        threads = DaemonThreads(2)
        inners = [Blocking() for _ in range(8)]
        environments = [wrap(inner, threads=threads) for inner in inners]
        await asyncio.gather(*(environment.reset(0) for environment in environments))
        names = {name for inner in inners for name in inner.threads}
        assert names <= {"environment-1", "environment-2"}
        await environments[0].close()
        assert inners[0].closed.is_set()
        assert threads.num_unfinished == 0

    asyncio.run(main())


def test_when_every_thread_hangs_a_waiting_call_fails_by_its_deadline() -> None:
    async def main() -> None:
        threads = DaemonThreads(1)
        holder, late = Blocking(), Blocking()
        step = asyncio.create_task(wrap(holder, threads=threads).step("x"))
        await asyncio.sleep(0.01)
        with pytest.raises(
            EnvironmentFailure, match=r"mine: reset did not return within 0.05 s \(2 calls on 1 threads\)"
        ):
            await wrap(late, deadline_s=0.05, threads=threads).reset(0)
        holder.gate.set()
        assert (await step).terminated
        await wrap(holder, threads=threads).close()
        assert late.threads == []  # what never began was taken back

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), "mine: step raised KeyError: 'x'"),
        (TimeoutError("inner"), "mine: step raised TimeoutError: inner"),
        (asyncio.CancelledError(), "mine: step was cancelled from inside"),
        (EnvironmentFailure("its own words"), "its own words"),
    ],
)
def test_what_an_environment_raises_names_the_boundary(error: BaseException, message: str) -> None:
    assert str(failure_of(lambda: wrap(Scripted(outcome=error)).step("x"))) == message


def test_a_failure_of_another_boundary_keeps_its_class() -> None:
    """A sandbox that is lost inside an environment is a failure of the infrastructure."""
    with pytest.raises(InfrastructureFailure, match="sandbox"):
        asyncio.run(wrap(Scripted(outcome=InfrastructureFailure("the sandbox is lost"))).step("x"))


@pytest.mark.parametrize(
    ("opening", "message"),
    [
        (None, "reset gave NoneType, not a list of messages"),
        ([], "reset returned no message"),
        (["hello"], "reset gave the message 'hello'"),
        ([{"role": "robot", "content": "x"}], "'role': one of system, user, assistant, tool"),
        ([{"role": "user", "content": 3}], "'content': a string"),
    ],
)
def test_an_opening_that_is_none_is_refused(opening: Any, message: str) -> None:
    assert message in str(failure_of(lambda: wrap(Scripted(opening=opening)).reset(0)))


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (("observation", 1.0, True, False, {}), "step returned tuple, not StepOutcome"),
        (StepOutcome([]), "step returned no observation, but the episode is not over"),
        (StepOutcome([{"role": "user"}]), "step gave the message"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_an_outcome_that_is_none_is_refused(outcome: Any, message: str) -> None:
    assert message in str(failure_of(lambda: wrap(Scripted(outcome=outcome)).step("x")))


def test_numbers_of_numpy_become_pythons_own() -> None:
    """Gymnasium's environments give numpy's rewards; what is made of them is written as JSON."""
    given = StepOutcome(
        [], np.float32(0.5), terminated=np.bool_(True), success=np.bool_(False), components={"goal": np.float32(0.5)}
    )
    environment = wrap(Scripted(outcome=given))
    outcome = asyncio.run(environment.step("left"))
    assert outcome == StepOutcome([], 0.5, terminated=True, success=False, components={"goal": 0.5})
    assert type(outcome.reward) is float and type(outcome.success) is bool and type(outcome.terminated) is bool
    assert json.loads(json.dumps(outcome.components)) == {"goal": 0.5}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (float("nan"), "reward nan; it must be finite"),
        (-1e300, r"reward -1e\+300; it must be finite, at most 1e\+18 in size"),
        (None, "gave reward None"),
        ("1 point", "1 point"),
    ],
)
def test_a_reward_that_is_no_number_is_a_failure_of_the_environment(reward: Any, message: str) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        asyncio.run(wrap(Scripted(outcome=StepOutcome([], reward, terminated=True))).step("left"))
