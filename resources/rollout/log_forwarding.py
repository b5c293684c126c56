"""What does the group queue say while somebody waits for it? Its log lines, carried to a logger as they come.

Actors have no flow run to log to, so the queue keeps its lines. A wait that takes long, or for ever, is just when
somebody wants to read them: that an environment raises, that no score comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.pools.actors import call_sync

PERIOD_S = 5.0
ANSWER_S = 10.0
"""Longest wait for the queue's answer, in seconds."""
NUM_LINES = 20
"""Lines told at once, at most: an outage says the same many times over."""


@contextmanager
def forwarded_log(queue: Any, say: Callable[[str], None], *, period_s: float = PERIOD_S) -> Iterator[None]:
    """While the block runs, ``say`` is given the queue's new log lines every ``period_s`` seconds, and once at its end.

    Args:
        queue: the group queue (an actor handle or a plain object).
        say: takes one line; called from a thread of this function's own.
    """
    ended = threading.Event()

    def forward() -> None:
        while not ended.wait(period_s):
            _say_new(queue, say)
        _say_new(queue, say)

    thread = threading.Thread(target=forward, name="queue-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * ANSWER_S)


def _say_new(queue: Any, say: Callable[[str], None]) -> None:
    try:
        lines: list[str] = call_sync(queue, "take_log", timeout_s=ANSWER_S)
    except (InfrastructureFailure, DeadlineExceeded):
        return  # whoever waits for the queue hears of its loss itself
    for line in lines[:NUM_LINES]:
        say(line)
    if len(lines) > NUM_LINES:
        say(f"... and {len(lines) - NUM_LINES} more lines like these")
