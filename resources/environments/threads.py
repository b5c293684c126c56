"""Where does blocking environment code run? In a bounded set of daemon threads, so that a call that hangs holds up one
thread and nothing else: not the event loop, and not the end of the process (a ThreadPoolExecutor would join it at
exit)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

DEFAULT_NUM_THREADS = 64


class DaemonThreads:
    """At most ``num_threads`` threads, started when needed, never joined."""

    def __init__(self, num_threads: int = DEFAULT_NUM_THREADS) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
        self.num_threads = num_threads
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_started = 0
        self._num_unfinished = 0
        self._abandoned: set[Future[Any]] = set()
        self.num_ever_abandoned = 0
        """Calls given up since the start."""

    @property
    def num_abandoned(self) -> int:
        """Calls that nobody waits for any more and that still hold a thread."""
        return len(self._abandoned)

    def abandon(self, future: Future[Any]) -> None:
        """Nobody waits for this call any more; until it returns, if it ever does, its thread is lost."""
        with self._lock:
            self._abandoned.add(future)
            self.num_ever_abandoned += 1
        future.add_done_callback(self._come_back)

    def _come_back(self, future: Future[Any]) -> None:
        with self._lock:
            self._abandoned.discard(future)

    @property
    def num_unfinished(self) -> int:
        """Calls that run or wait; above ``num_threads`` some of them wait."""
        return self._num_unfinished

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run ``call`` in a thread; a future that is cancelled before its turn never runs."""
        future: Future[Any] = Future()
        with self._lock:
            self._num_unfinished += 1
            if self._num_unfinished > self._num_started and self._num_started < self.num_threads:
                self._num_started += 1
                threading.Thread(target=self._work, name=f"environment-{self._num_started}", daemon=True).start()
        self._calls.put((future, call))
        return future

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                result, failure = None, None
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001  (it belongs to whoever awaits the future)
                    failure = error
                self._has_finished()  # first: who has the answer sees the call gone
                if failure is None:
                    future.set_result(result)
                else:
                    future.set_exception(failure)
                del result, failure
            else:
                self._has_finished()
            del future, call  # an idle thread keeps no environment alive

    def _has_finished(self) -> None:
        with self._lock:
            self._num_unfinished -= 1
