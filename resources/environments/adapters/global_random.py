"""Libraries that draw from Python's global generator: how does each episode of theirs get a stream of its own?"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_turn = threading.Lock()
"""The global generator belongs to the process, so who takes it over takes turns with the others."""


class GlobalRandom:
    """The global generator's state for one episode. Inside `taken_over` the library draws from it, and what others had
    drawn from is put back after. Other threads that draw from the global generator meanwhile disturb the episode; in a
    child process with one episode there are none."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        with _turn:
            outside = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outside)
