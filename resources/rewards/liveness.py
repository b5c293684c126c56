"""Signs of life in the object store: of a run, which its replicas watch, and of replicas, which the autoscaler counts.

    driver                             {"beat": n, "at": unix seconds, "ended": bool, "life": n}, written by its driver
    heartbeat                          the same for its replicas, which end before the driver does
    rewards/replicas/<owner>.json      the same, written by a replica

A watcher compares what it reads with what it read before, by its own clock: two clocks are never compared. A run or a
replica has ended when its sign says so, and is gone when its sign has not changed for longer than the timeout.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from resources.object_store import ObjectStore

logger = logging.getLogger(__name__)

RUN_HEARTBEAT = "heartbeat"
RUN_DRIVER = "driver"
REPLICAS = "rewards/replicas"


def run_store(store: ObjectStore, run_id: str) -> ObjectStore:
    """The part of the root store that holds this run."""
    return store.sub(f"runs/{run_id}")


class Beacon:
    """Writes one sign of life. ``facts`` is what else readers may want to know (JSON-able)."""

    def __init__(self, store: ObjectStore, key: str, facts: dict[str, Any] | None = None) -> None:
        self._store = store
        self._key = key
        self._facts = facts or {}
        self._num_beats = 0

    def beat(self, *, ended: bool = False, **facts: Any) -> None:
        self._num_beats += 1
        sign = self._facts | facts | {"beat": self._num_beats, "at": time.time(), "ended": ended}
        self._store.put_json(self._key, sign)


class Watch:
    """Reads one sign of life. ``clock`` is the watcher's own, in seconds; a sign never seen counts from the start."""

    def __init__(self, store: ObjectStore, key: str, clock: Callable[[], float]) -> None:
        self._store = store
        self._key = key
        self._clock = clock
        self.last_sign: tuple[int, float] | None = None
        """Number and time of the last sign seen: a restarted writer counts from 1 again, at another time."""
        self._changed_at = clock()
        self.ended = False
        self.facts: dict[str, Any] = {}
        """The sign as last read."""

    def silent_s(self) -> float:
        """Seconds since the sign was last seen to change; reads it now. Sets ``ended``."""
        now = self._clock()
        try:
            sign = self._store.get_json(self._key)
        except KeyError:
            return now - self._changed_at
        self.ended, self.facts = bool(sign["ended"]), sign
        if (sign["beat"], sign["at"]) != self.last_sign:
            self.last_sign = (sign["beat"], sign["at"])
            self._changed_at = now
        return now - self._changed_at


def has_driver(
    store: ObjectStore,
    run_id: str,
    life: int,
    period_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether the driver of the run's newest life (0: before any resume) lives: looks at its sign of life for up to
    three of its periods.

    A life that was claimed and has given no sign yet is waited for as long. Returns at once when the sign is of that
    life and says that it has ended, or when a run that was never resumed gives none.
    """
    watch = Watch(run_store(store, run_id), RUN_DRIVER, clock)
    watch.silent_s()
    first, start = watch.last_sign, clock()
    while True:
        if watch.facts.get("life") == life:
            if watch.ended:
                return False
            if watch.last_sign != first:
                return True
        elif life == 0:
            return False
        if clock() - start >= 3 * period_s:
            return False
        sleep(period_s / 4)
        watch.silent_s()


class RunHeartbeat:
    """Says every ``period_s`` seconds, from a daemon thread, that the run is alive. Use as a context manager.

    At the end it says that the run has ended, so that replicas end at once instead of after a timeout. ``facts``: what
    else readers may want to know (JSON-able).
    """

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        period_s: float = 2.0,
        *,
        key: str = RUN_HEARTBEAT,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self._beacon = Beacon(run_store(store, run_id), key, facts)
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-heartbeat", daemon=True)

    def start(self) -> RunHeartbeat:
        self._beacon.beat()
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)
        self._beacon.beat(ended=True)

    def __enter__(self) -> RunHeartbeat:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._beacon.beat()
            except OSError:  # one missed beat is what the timeout of the watchers allows for
                logger.warning("the run's heartbeat could not be written", exc_info=True)


class ReplicaWatch:
    """Which replicas of a run there are, and which were ever seen."""

    def __init__(
        self, store: ObjectStore, run_id: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = run_store(store, run_id)
        self._timeout_s = timeout_s
        self._clock = clock
        self._watched: dict[str, Watch] = {}

    def running(self) -> set[str]:
        """Owners of the replicas that are alive. One list call, and one read per replica that has not ended."""
        for key in self._store.list(REPLICAS):
            owner = key.rsplit("/", 1)[1].removesuffix(".json")
            if owner not in self._watched:
                self._watched[owner] = Watch(self._store, key, self._clock)
        running = set()
        for owner, watch in self._watched.items():
            if watch.ended:
                continue  # an owner's name is used once
            silent_s = watch.silent_s()
            if not watch.ended and silent_s < self._timeout_s:
                running.add(owner)
        return running

    def seen(self) -> set[str]:
        """Owners of all replicas that ever registered."""
        return set(self._watched)
