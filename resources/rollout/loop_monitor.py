"""Who blocks the event loop? A thread of its own watches the loop on which all trajectories of a worker are played.

An async environment that computes or sleeps in its coroutine stops every other trajectory, the reports to the group
queue, and every deadline: no timer fires. From outside that looks like a lost worker. This monitor sees the task that
is running and where it stands, so that the failure can be told by its name.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from resources.environments.deadline import CALL_SEPARATOR

NUM_FRAMES = 4
"""Innermost calls that are told."""


@dataclass(frozen=True, slots=True)
class Blockade:
    """The loop has not come round since ``seconds``."""

    seconds: float
    task: str
    """Name of the task that runs."""
    stack: str
    """Innermost calls, the last one first."""

    @property
    def trajectory_id(self) -> str:
        """The trajectory whose environment blocks; empty when it is not an environment's call."""
        trajectory_id, separator, _ = self.task.partition(CALL_SEPARATOR)
        return trajectory_id if separator else ""

    def __str__(self) -> str:
        return f"the event loop has been blocked for {self.seconds:.1f} s by {self.task or 'no task'}, at {self.stack}"


class LoopMonitor:
    """``on_blocked`` is called from the monitor's thread: once for each blockade.

    Args:
        after_s: a loop that has not come round for so long is blocked, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread_id: int,
        on_blocked: Callable[[Blockade], None],
        *,
        after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop, self._thread_id, self._on_blocked = loop, thread_id, on_blocked
        self._after_s, self._clock = after_s, clock
        self._beat_at = clock()
        self._told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def look(self) -> Blockade | None:
        """What blocks the loop now; None when it has come round lately. Callable from any thread."""
        seconds = self._clock() - self._beat_at
        if seconds < self._after_s:
            return None
        return Blockade(seconds, _task_name(self._loop), _stack(self._thread_id))

    def step(self) -> None:
        """Ask the loop for a sign of life, and tell of a blockade that is new."""
        blockade = self.look()
        if blockade is None:
            self._told = False
        elif not self._told:
            self._told = True
            self._on_blocked(blockade)
        try:
            self._loop.call_soon_threadsafe(self._beat)
        except RuntimeError:  # the loop is closed: the worker has ended
            self._ended.set()

    def _beat(self) -> None:
        self._beat_at = self._clock()

    def _run(self) -> None:
        while not self._ended.wait(self._after_s / 4):
            self.step()


def _task_name(loop: asyncio.AbstractEventLoop) -> str:
    try:
        task = asyncio.current_task(loop)
    except RuntimeError:
        return ""
    return task.get_name() if task is not None else ""


def _stack(thread_id: int) -> str:
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "no frame"
    calls = [f"{each.name} ({each.filename}:{each.lineno})" for each in traceback.extract_stack(frame)[-NUM_FRAMES:]]
    return " < ".join(reversed(calls))
