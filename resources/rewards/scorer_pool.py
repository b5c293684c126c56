"""A replica's scorer processes: kept warm, one request each, killed at the request's deadline and replaced."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from resources.failures import FailureClass, RewardFailure
from resources.rewards.base import Score, ScoringRequest
from resources.rewards.queue import unscored
from resources.rewards.scorer_process import ScorerProcess

MAX_FAILED_STARTS = 3


class ScoringBackend(Protocol):
    """What a replica scores with. Tickets are the caller's, and come back with the scores."""

    num_processes: int

    def submit(self, ticket: Any, request: ScoringRequest, arguments: Mapping[str, Any]) -> None: ...

    def wait(self, timeout_s: float) -> list[tuple[Any, Score]]:
        """Scores that are ready, after at most ``timeout_s`` seconds; at once when some are."""
        ...

    def num_waiting(self) -> int:
        """Requests that no process has taken up."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Task:
    ticket: Any
    request: ScoringRequest
    arguments: dict[str, Any]


@dataclass(slots=True)
class _Worker:
    process: ScorerProcess
    give_up_at: float
    """When it is killed, by the monotonic clock: not ready by then, or its request past its deadline."""
    ready: bool = False
    task: _Task | None = None
    started_at: float = field(default=0.0)


class ScorerPool:
    """Scores in ``num_processes`` processes. One thread, no locks: `wait` does everything.

    The deadline of a request starts when a process takes it up. A scorer that misses it, raises, or ends its process
    gives an unscored result (a reward failure) with the reason; the slot is back at once.
    """

    def __init__(self, num_processes: int, start_timeout_s: float = 30.0) -> None:
        self.num_processes = num_processes
        self._start_timeout_s = start_timeout_s
        self._waiting: deque[_Task] = deque()
        self._failed_starts = 0
        self._workers = [self._start() for _ in range(num_processes)]

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, ticket: Any, request: ScoringRequest, arguments: Mapping[str, Any]) -> None:
        self._waiting.append(_Task(ticket, request, dict(arguments)))

    def num_waiting(self) -> int:
        return len(self._waiting)

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def wait(self, timeout_s: float) -> list[tuple[Any, Score]]:
        """Scores that are ready, after at most ``timeout_s`` seconds; at once when some are.

        Raises RewardFailure when scorer processes cannot be started.
        """
        end = time.monotonic() + timeout_s
        finished: list[tuple[Any, Score]] = []
        while True:
            self._hand_out()
            now = time.monotonic()
            until = min([end, *(w.give_up_at for w in self._workers if w.task is not None or not w.ready)])
            finished += self._exchange(0.0 if finished else max(0.0, until - now))
            finished += self._kill_overdue()
            if finished:
                self._hand_out()  # the processes work on while the caller stores what is finished
                return finished
            if time.monotonic() >= end:
                return finished

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._workers = []

    def _start(self) -> _Worker:
        return _Worker(ScorerProcess(), give_up_at=time.monotonic() + self._start_timeout_s)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not self._waiting:
                return
            if worker.ready and worker.task is None:
                worker.task = self._waiting.popleft()
                worker.started_at = time.monotonic()
                worker.give_up_at = worker.started_at + worker.task.request.deadline_s
                worker.process.send(worker.task.request, worker.task.arguments)

    def _exchange(self, timeout_s: float) -> list[tuple[Any, Score]]:
        """Read and write what is possible within the time; returns at the first event."""
        finished = []
        with selectors.DefaultSelector() as selector:
            for index, worker in enumerate(self._workers):
                selector.register(worker.process.stdout, selectors.EVENT_READ, index)
                if worker.process.wants_to_write:
                    selector.register(worker.process.stdin, selectors.EVENT_WRITE, index)
            for key, _ in selector.select(timeout_s):
                worker = self._workers[key.data]
                if key.fileobj is worker.process.stdin:
                    worker.process.write()
                    continue
                finished += self._read(key.data, worker)
        return finished

    def _read(self, index: int, worker: _Worker) -> list[tuple[Any, Score]]:
        try:
            message = worker.process.read()
        except (EOFError, ValueError):  # gone, or not JSON
            return self._replace(index, "the scorer's process")
        if message is None:
            return []
        if not worker.ready:
            worker.ready = True
            self._failed_starts = 0
            return []
        task, worker.task = worker.task, None
        assert task is not None, f"scorer process {worker.process.pid} answers without a question: {message}"
        return [(task.ticket, _to_score(task.request, message))]

    def _kill_overdue(self) -> list[tuple[Any, Score]]:
        now = time.monotonic()
        finished = []
        for index, worker in enumerate(self._workers):
            if now >= worker.give_up_at and (worker.task is not None or not worker.ready):
                deadline_s = worker.task.request.deadline_s if worker.task else self._start_timeout_s
                finished += self._replace(index, f"no answer within the deadline of {deadline_s:g} s: the scorer")
        return finished

    def _replace(self, index: int, what: str) -> list[tuple[Any, Score]]:
        """Kill a process and start another in its place; answers the request that it held."""
        worker = self._workers[index]
        ending = worker.process.kill()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise RewardFailure(
                    f"{MAX_FAILED_STARTS} scorer processes in a row did not start within {self._start_timeout_s:g} s "
                    f"(the last one {ending}): its stderr is in the replica's log"
                )
        self._workers[index] = self._start()
        if worker.task is None:
            return []
        duration_s = time.monotonic() - worker.started_at
        return [(worker.task.ticket, unscored(worker.task.request, f"{what} {ending}", duration_s))]


def _to_score(request: ScoringRequest, message: dict[str, Any]) -> Score:
    if "error" in message:
        return unscored(request, f"the scorer raised {message['error']}", message["duration_s"])
    score = message["score"]
    return Score(
        trajectory_id=request.trajectory_id,
        scorer=request.scorer,
        scorer_version=request.scorer_version,
        reward=score["reward"],
        success=score["success"],
        components=score["components"],
        failure=None if score["failure"] is None else FailureClass(score["failure"]),
        failure_message=score["failure_message"],
        duration_s=message["duration_s"],
    )
