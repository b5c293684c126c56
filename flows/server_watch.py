"""When is a Prefect server that does not answer given up?

Prefect's client tries every call again, for about a minute: that carries a run over the restart of its server. But when
the server is gone, each of the last calls of a run (the states of its iterations, and its own) would take that minute,
one after the other. So one watch asks the server for signs of life, and once there were none for `LOST_AFTER_S`, calls
fail at their next attempt; when the server answers again, they are tried again as before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from prefect.logging import get_logger
from prefect.settings import Settings

LOST_AFTER_S = 60.0
"""A server that gave no sign of life for so long is lost, in seconds."""
PERIOD_S = 5.0
ANSWER_S = 5.0
"""Longest wait for a sign of life, in seconds. Any answer is one, an error too."""


class ServerWatch:
    """``settings`` are those in force for the run, changed while the server is lost.

    Args:
        answers: asks the server; False when it gave no answer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        api_url: str,
        settings: Settings,
        answers: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api_url, self._settings, self._answers, self._clock = api_url, settings, answers, clock
        self._answered_at = clock()
        self._retries: int | None = None
        """What is to be restored; None while the server lives."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefect-server-watch", daemon=True)

    def look(self) -> None:
        """Ask once, and draw the conclusion."""
        if self._answers():
            self._answered_at = self._clock()
            if self._retries is not None:
                self._settings.client.max_retries, self._retries = self._retries, None
        elif self._retries is None and self._clock() - self._answered_at >= LOST_AFTER_S:
            self._retries, self._settings.client.max_retries = self._settings.client.max_retries, 0
            get_logger("flows.server").error(
                "the Prefect server at %s has given no sign of life for %.0f s: calls to it are not tried again",
                self._api_url,
                LOST_AFTER_S,
            )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(ANSWER_S + 1.0)

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.look()


@contextmanager
def server_watched(api_url: str, settings: Settings) -> Iterator[None]:
    """Watch the server of a run for the block."""

    def answers() -> bool:
        try:
            client.get("/health")
        except httpx.TransportError:
            return False
        return True

    with httpx.Client(base_url=api_url, timeout=ANSWER_S) as client:
        watch = ServerWatch(api_url, settings, answers)
        watch.start()
        try:
            yield
        finally:
            watch.stop()
