"""Two iterations at once: when may an iteration begin, when may it use the learner, and when the engines?

The learner need not stand idle while iteration v switches the engines and records what it measured: batch v + 1 was
sampled under versions that the staleness bound allows already. So a run that is not synchronous lets iteration v + 1
begin early, and two iterations hand over to each other:

| iteration v + 1              | waits for, of iteration v                                      |
|------------------------------|----------------------------------------------------------------|
| its flow run, collect        | batch v is collected (and iteration v - 1 has ended)           |
| update                       | version v + 1 is published                                     |
| switch-weights               | its end: version v + 1 is loaded, recorded and, when due, evaluated |

Nothing else changes: versions are trained, published, loaded and recorded in order, and what a resume starts from is
still the last iteration that was recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Any

from resources.failures import DeadlineExceeded, InfrastructureFailure

JOIN_S = 5.0
"""Longest wait for iterations that are under way when a run is given up; their stages fail as the cluster goes."""


class Laps:
    """When an iteration of the run last came to its record stage, in seconds of `time.time`; 0: none has."""

    def __init__(self) -> None:
        self.last_at = 0.0


class Turn:
    """One iteration's place among those that run at once, and behind those that ran."""

    def __init__(self, version: int, previous: Turn | None = None, laps: Laps | None = None) -> None:
        self.version = version
        self.previous = previous
        self._laps = laps or Laps()
        self.failure: BaseException | None = None
        self.row: dict[str, Any] | None = None
        self.learner_free_at = 0.0
        """When the iteration before had published, in seconds of `time.time`; known once it is waited for."""
        self.published_at = 0.0
        self._collected, self._published, self._ended = threading.Event(), threading.Event(), threading.Event()

    def has_collected(self) -> None:
        """The batch is taken: the next iteration may begin."""
        self._collected.set()

    def has_published(self) -> None:
        """The learner is free: the next iteration may update."""
        self.published_at = time.time()
        self._published.set()

    def has_ended(self, row: dict[str, Any] | None, failure: BaseException | None) -> None:
        """The next iteration may switch weights, or learns that there is nothing to go on from."""
        self.row, self.failure = row, failure
        self.previous = None  # or the first iteration would be kept by the last
        for event in (self._collected, self._published, self._ended):
            event.set()

    def lap(self, started: float) -> float:
        """Seconds since the run's iteration before called this, or since ``started`` when there is none."""
        before, self._laps.last_at = self._laps.last_at or started, time.time()
        return self._laps.last_at - before

    def wait_for_learner(self, timeout_s: float) -> None:
        """Until the iteration before has published. Raises as `wait_for_engines`."""
        if (previous := self.previous) is not None:
            previous.wait_published(timeout_s)
            previous.check()
            self.learner_free_at = previous.published_at

    def wait_for_engines(self, timeout_s: float) -> None:
        """Until the iteration before has ended.

        Raises DeadlineExceeded after ``timeout_s`` seconds, InfrastructureFailure when that iteration failed.
        """
        if (previous := self.previous) is not None:
            previous.wait_ended(timeout_s)
            previous.check()

    def wait_collected(self, timeout_s: float) -> None:
        self._wait(self._collected, "collect its batch", timeout_s)

    def wait_published(self, timeout_s: float) -> None:
        self._wait(self._published, "publish its version", timeout_s)

    def wait_ended(self, timeout_s: float) -> None:
        self._wait(self._ended, "end", timeout_s)

    def check(self) -> None:
        """Raises InfrastructureFailure when this iteration failed."""
        if self.failure is not None:
            raise InfrastructureFailure(
                f"iteration {self.version}, which this one goes on from, failed: {self.failure}"
            ) from self.failure

    def _wait(self, event: threading.Event, what: str, timeout_s: float) -> None:
        if not event.wait(timeout_s):
            raise DeadlineExceeded(f"iteration {self.version} did not {what} within {timeout_s:g} s")


_turn: ContextVar[Turn | None] = ContextVar("turn", default=None)


def turn_of(version: int) -> Turn:
    """The turn of the iteration that runs in this context; one that waits for nothing when it runs alone."""
    turn = _turn.get()
    return turn if turn is not None and turn.version == version else Turn(version)


class Iterations:
    """Plays a run's iterations, two at once when ``overlap`` is set. Context manager: it waits for those under way.

    Enter it before what the iterations use, so that it is left after that is closed: closing is what ends them.
    """

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Iterations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        give_up_at = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))

    def run(self, play: Callable[[int], dict[str, Any]], versions: range, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Play every iteration; yields what each returned, in order. Raises what the first that failed raised.

        Args:
            play: plays one iteration, given its version.
            timeout_s: longest wait for an iteration to collect, and for one to end, in seconds.
        """
        laps = Laps()
        if not self._overlap:
            for version in versions:
                alone = _turn.set(Turn(version, laps=laps))
                try:
                    row = play(version)
                finally:
                    _turn.reset(alone)
                yield row
            return
        begun: list[Turn] = []
        for version in versions:
            if begun:
                begun[-1].wait_collected(timeout_s)
            if len(begun) == 2:
                yield _row_of(begun.pop(0), timeout_s)
            if begun and begun[-1].failure is not None:
                break
            begun.append(self._begin(play, Turn(version, begun[-1] if begun else None, laps)))
        for turn in begun:
            yield _row_of(turn, timeout_s)

    def _begin(self, play: Callable[[int], dict[str, Any]], turn: Turn) -> Turn:
        context = copy_context()
        context.run(_turn.set, turn)

        def target() -> None:
            try:
                row = context.run(play, turn.version)
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread of the run
                turn.has_ended(None, error)
            else:
                turn.has_ended(row, None)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=target, name=f"iteration-{turn.version}", daemon=True))
        self._threads[-1].start()
        return turn


def _row_of(turn: Turn, timeout_s: float) -> dict[str, Any]:
    turn.wait_ended(timeout_s)
    if turn.failure is not None:
        raise turn.failure
    assert turn.row is not None, turn.version
    return turn.row
