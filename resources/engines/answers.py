"""How does an answer reach the event loop on which somebody waits for it?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

Answer = tuple[asyncio.Future[Any], Any]


class AnswerBox:
    """Hands results to futures of event loops: one wake-up per loop, however many results are sent together. One thread
    at a time."""

    def __init__(self) -> None:
        self._ready: dict[asyncio.AbstractEventLoop, list[Answer]] = {}

    def put(self, future: asyncio.Future[Any], result: Any) -> None:
        """Keep a result until `send`; an exception is raised where the future is awaited."""
        self._ready.setdefault(future.get_loop(), []).append((future, result))

    def send(self) -> None:
        """Settle the futures that nobody has settled or cancelled. Nobody waits on a loop that is closed."""
        if not self._ready:
            return
        ready, self._ready = self._ready, {}
        for loop, answers in ready.items():
            call_on_loop(loop, _settle, answers)


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    """Call on a loop: soon on the running one, else thread-safe; not at all when the loop is closed."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    try:
        (loop.call_soon if loop is running else loop.call_soon_threadsafe)(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _settle(answers: list[Answer]) -> None:
    for future, result in answers:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
