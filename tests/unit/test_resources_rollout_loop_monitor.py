"""An async environment that blocks the event loop is named, together with the place where it stands."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from resources.environments.deadline import DeadlineEnvironment
from resources.environments.threads import DaemonThreads
from resources.failures import EnvironmentFailure
from resources.rollout.loop_monitor import Blockade, LoopMonitor


class BlockingCoroutine:
    """``step`` is a coroutine that waits as only threads may."""

    env_version = "1"
    max_turns = 3

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()

    async def reset(self, seed: int): ...

    async def step(self, action: str):
        self.entered.set()
        assert self.gate.wait(30)


class WatchedLoop:
    """An event loop in a thread of its own, its monitor stepped by the test, whose clock it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[Blockade] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        assert self.thread.ident is not None
        self.monitor = LoopMonitor(self.loop, self.thread.ident, self.told.append, after_s=2.0, clock=lambda: self.now)

    def come_round(self) -> None:
        """Until the loop has run what it was given."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(10)

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.monitor.step()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


def test_the_environment_that_blocks_is_named_once():
    watched, inner = WatchedLoop(), BlockingCoroutine()
    environment = DeadlineEnvironment(
        inner, family="maze", reset_deadline_s=9.0, step_deadline_s=9.0, threads=DaemonThreads(1)
    )

    async def play():
        task = asyncio.current_task()
        assert task is not None
        task.set_name("run/maze-000001/0/0")
        await environment.close()
        with suppress(EnvironmentFailure):  # what it answers is not the point here
            await environment.step("north")

    playing = asyncio.run_coroutine_threadsafe(play(), watched.loop)
    assert inner.entered.wait(10)
    watched.step(0.0)
    watched.step(1.9)
    assert not watched.told
    watched.step(0.2)
    watched.step(5.0)
    (blockade,) = watched.told
    assert blockade.seconds == 2.1 and blockade.trajectory_id == "run/maze-000001/0/0"
    assert blockade.task == "run/maze-000001/0/0 in step of the environment of 'maze'"
    assert "step (" in blockade.stack and "test_resources_rollout_loop_monitor.py:" in blockade.stack
    assert str(blockade).startswith(
        "the event loop has been blocked for 2.1 s by run/maze-000001/0/0 in step of the environment of 'maze', at "
    )
    blocked_for = watched.monitor.look()
    assert blocked_for is not None and blocked_for.seconds == 7.1

    inner.gate.set()
    playing.result(10)
    watched.come_round()
    assert watched.monitor.look() is None
    watched.close()


def test_a_loop_that_comes_round_is_never_called_blocked():
    watched = WatchedLoop()
    for _ in range(10):
        watched.step(1.0)
        watched.come_round()
    assert not watched.told and watched.monitor.look() is None
    watched.close()


def test_what_is_no_environments_call_is_told_without_a_culprit():
    watched, gate, entered = WatchedLoop(), threading.Event(), threading.Event()

    def block():
        entered.set()
        assert gate.wait(30)

    watched.loop.call_soon_threadsafe(block)
    assert entered.wait(10)
    watched.step(2.5)
    (blockade,) = watched.told
    assert (blockade.task, blockade.trajectory_id) == ("", "") and "by no task, at" in str(blockade)
    gate.set()
    watched.come_round()
    watched.close()


def test_a_closed_loop_ends_its_monitor():
    watched = WatchedLoop()
    watched.close()
    watched.monitor.step()
    assert watched.monitor._ended.is_set()
