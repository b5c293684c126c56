"""Which time is it in a simulation? Real time run faster or slower, or time that a test moves by hand.

Seconds of a clock are simulated seconds; ``scale`` of them pass in one second of the machine.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    @property
    def scale(self) -> float:
        """Simulated seconds that pass in one second of the machine."""
        ...

    def now(self) -> float:
        """Simulated seconds since some fixed moment; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for simulated seconds."""
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call back at a simulated time, on the running event loop."""
        ...


class ScaledClock:
    """The machine's monotonic clock times ``scale``."""

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ValueError(f"the scale of a clock is {scale}; it must be above 0")
        self._scale = scale
        self._epoch = time.monotonic()

    @property
    def scale(self) -> float:
        return self._scale

    def now(self) -> float:
        return (time.monotonic() - self._epoch) * self._scale

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / self._scale)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()) / self._scale, callback)


class ManualClock:
    """Stands still until `advance`."""

    scale = 1.0

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, _ManualTimer]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        done = asyncio.get_running_loop().create_future()
        self.call_at(self._now + seconds, lambda: None if done.done() else done.set_result(None))
        await done

    def call_at(self, when: float, callback: Callable[[], None]) -> _ManualTimer:
        timer = _ManualTimer(callback)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass; callbacks that fall due are called in order, each at its own time."""
        until = self._now + seconds
        while self._timers and self._timers[0][0] <= until:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            if not timer.cancelled:
                timer.callback()
        self._now = until


class _ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
