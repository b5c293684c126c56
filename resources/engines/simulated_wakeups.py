"""Who looks at a simulated engine, and when? One timer on each event loop with callers that wait, none per request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from resources.clock import Clock, TimerHandle
from resources.engines.answers import call_on_loop


class WakeUps:
    """The owner's lock is held in every method but the callbacks."""

    def __init__(self, clock: Clock, look: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        """``look``: called on a loop, without the lock, when its timer ends or when it is to look again."""
        self._clock, self._look = clock, look
        self._waiters: Counter[asyncio.AbstractEventLoop] = Counter()
        """Callers that wait, by event loop."""
        self._timers: dict[asyncio.AbstractEventLoop, tuple[float, TimerHandle]] = {}

    def waits(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether callers wait on the loop."""
        return self._waiters[loop] > 0

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """One more caller waits."""
        self._waiters[loop] += 1

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """One caller fewer waits; the last one takes the timer along."""
        self._waiters[loop] -= 1
        if not self._waiters[loop]:
            del self._waiters[loop]
            self.disarm(loop)

    def arm(self, loop: asyncio.AbstractEventLoop, when: float | None) -> None:
        """Wake this loop (the running one) then, and not before; None: never. An earlier timer stays."""
        timer = self._timers.get(loop)
        if timer is not None:
            if when is not None and timer[0] <= when:
                return
            self.disarm(loop)
        if when is not None:
            self._timers[loop] = when, self._clock.call_at(when, lambda: self._look(loop))

    def disarm(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the loop's timer, if there is one; one that has ended is forgotten."""
        timer = self._timers.pop(loop, None)
        if timer is not None:
            timer[1].cancel()

    def look_everywhere(self) -> None:
        """What ends next may have changed for every loop with callers."""
        for loop in list(self._waiters):
            call_on_loop(loop, self._look, loop)
