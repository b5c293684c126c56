"""Which rollout worker gets which trajectory? By free capacity, evaluation first, retries next, then in order of start.

Pure bookkeeping: time is passed in (seconds of any monotonic clock).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from resources.rollout.breaker import BreakerState, FamilyBreaker
from resources.rollout.gate_events import CancelTermination
from resources.rollout.messages import Assignment, Wait

Lane = Literal["eval", "retry", "train"]
LANES: tuple[Lane, ...] = ("eval", "retry", "train")
LONGEST_PAUSE_S = 10.0


@dataclass(slots=True)
class WorkerRecord:
    capacity: int
    last_heard: float
    held: dict[str, Assignment] = field(default_factory=dict)
    """Assigned and not ended."""
    cancels: list[tuple[str, str]] = field(default_factory=list)
    """To be delivered with the next orders."""
    waiting: dict[str, Wait] = field(default_factory=dict)
    """Its longest waits, as last reported."""

    blocked: str = ""
    """Why its event loop stands still, as last told."""

    @property
    def free(self) -> int:
        return max(0, self.capacity - len(self.held))


class Dispatcher:
    """Assignments that wait for a worker, and who holds the others."""

    def __init__(self, *, worker_timeout_s: float, retry_backoff_s: float, breaker_failures: int) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.holder: dict[str, str] = {}
        """Worker of each assigned trajectory."""
        self._worker_timeout_s = worker_timeout_s
        self._retry_backoff_s = retry_backoff_s
        self._breaker_failures = breaker_failures
        self._lanes: dict[tuple[Lane, str], deque[str]] = {}
        self._queued: dict[str, tuple[int, Assignment]] = {}
        self._delayed: list[tuple[float, int, Lane, str]] = []
        self._num_added = 0
        self.breakers: dict[str, FamilyBreaker] = {}
        """Of every family that was ever played."""

    # -- assignments -------------------------------------------------------------------------------------------------

    def add(self, assignment: Assignment, lane: Lane, now: float) -> None:
        """Queue an assignment. Retries wait out a pause that doubles with each failure in a row of their family."""
        self._num_added += 1
        trajectory_id = assignment.trajectory_id
        self._queued[trajectory_id] = (self._num_added, assignment)
        if lane == "retry":
            ready = now + self._pause(self.breaker(assignment.family).failures_in_a_row)
            heapq.heappush(self._delayed, (ready, self._num_added, lane, trajectory_id))
        else:
            self._lanes.setdefault((lane, assignment.family), deque()).append(trajectory_id)

    def release(self, now: float) -> bool:
        """Let delayed retries whose pause is over into their lane; True when there were any, or the pause of a family
        that waits has just ended."""
        released = False
        while self._delayed and self._delayed[0][0] <= now:
            _, _, lane, trajectory_id = heapq.heappop(self._delayed)
            if trajectory_id in self._queued:
                family = self._queued[trajectory_id][1].family
                self._lanes.setdefault((lane, family), deque()).append(trajectory_id)
                released = True
        for breaker in self.breakers.values():
            if breaker.due_in_s(now) == 0.0:
                breaker.num_allowed(now)
                released = True
        return released

    def cancel(self, trajectory_id: str, termination: CancelTermination) -> bool:
        """Stop a trajectory: tell its worker, or take it from the queue. False when no worker will ever report its
        end."""
        self._withdraw(trajectory_id)
        if self._queued.pop(trajectory_id, None) is not None:
            return False
        worker_id = self.holder.get(trajectory_id)
        if worker_id is None:
            return False
        self.workers[worker_id].cancels.append((trajectory_id, termination))
        return True

    def ended(self, trajectory_id: str) -> None:
        """No worker holds it any more."""
        self._withdraw(trajectory_id)
        worker_id = self.holder.pop(trajectory_id, None)
        if worker_id is not None:
            self.workers[worker_id].held.pop(trajectory_id, None)

    def note_outcome(self, trajectory_id: str, family: str, failure: str | None, now: float) -> None:
        """A trajectory was played: well, or with this message of its environment, engine or scorer. To be told before
        `ended`."""
        self.breaker(family).ended(trajectory_id, failure is not None, failure or "", now)

    def breaker(self, family: str) -> FamilyBreaker:
        return self.breakers.setdefault(
            family,
            FamilyBreaker(
                threshold=self._breaker_failures,
                first_pause_s=self._retry_backoff_s,
                longest_pause_s=LONGEST_PAUSE_S,
            ),
        )

    def _withdraw(self, trajectory_id: str) -> None:
        for breaker in self.breakers.values():
            breaker.withdrawn(trajectory_id)

    def _pause(self, failures: int) -> float:
        return min(LONGEST_PAUSE_S, self._retry_backoff_s * 2 ** min(failures, 16))

    # -- workers -----------------------------------------------------------------------------------------------------

    def heard(self, worker_id: str, capacity: int, now: float) -> WorkerRecord:
        record = self.workers.setdefault(worker_id, WorkerRecord(capacity, now))
        record.capacity, record.last_heard, record.blocked = capacity, now, ""
        return record

    def never_arrived(self, worker_id: str, held: set[str]) -> list[str]:
        """Assignments of a worker that it does not know: the orders that carried them were lost."""
        return [trajectory_id for trajectory_id in self.workers[worker_id].held if trajectory_id not in held]

    def unknown_to_us(self, worker_id: str, held: set[str]) -> list[str]:
        """What a worker plays although it was taken from it (it was lost, and came back)."""
        return [trajectory_id for trajectory_id in held if self.holder.get(trajectory_id) != worker_id]

    def silent(self, now: float) -> list[str]:
        """Workers not heard of for longer than the timeout."""
        limit = now - self._worker_timeout_s
        return [worker_id for worker_id, record in self.workers.items() if record.last_heard < limit]

    def remove_worker(self, worker_id: str) -> list[str]:
        """Forget a lost worker; returns the trajectories it held."""
        record = self.workers.pop(worker_id, None)
        if record is None:
            return []
        for trajectory_id in record.held:
            self.holder.pop(trajectory_id, None)
        return list(record.held)

    def take(self, worker_id: str, now: float) -> tuple[list[Assignment], list[tuple[str, str]]]:
        """Orders for a worker: its share of what is queued by free capacity, and every cancel meant for it."""
        record = self.workers[worker_id]
        cancels, record.cancels = record.cancels, []
        ready = self.num_ready(now)
        num_free = sum(worker.free for worker in self.workers.values())
        share = math.ceil(ready * record.free / num_free) if num_free else 0
        assignments = []
        for _ in range(min(share, record.free)):
            assignment = self._next(now)
            if assignment is None:
                break
            if assignment.split == "train":
                self.breaker(assignment.family).started(assignment.trajectory_id, now)
            record.held[assignment.trajectory_id] = assignment
            self.holder[assignment.trajectory_id] = worker_id
            assignments.append(assignment)
        return assignments, cancels

    def num_ready(self, now: float) -> int:
        """Trajectories that may start now."""
        ready = 0
        by_family: dict[str, int] = {}
        for (lane, family), queue in self._lanes.items():
            if lane == "eval":
                ready += len(queue)
            else:
                by_family[family] = by_family.get(family, 0) + len(queue)
        for family, waiting in by_family.items():
            allowed = self.breaker(family).num_allowed(now)
            ready += waiting if allowed is None else min(waiting, allowed)
        return ready

    def num_queued(self) -> int:
        return len(self._queued)

    def stage_of(self, trajectory_id: str) -> str:
        """Where a trajectory is, for people."""
        if trajectory_id in self._queued:
            _, assignment = self._queued[trajectory_id]
            if assignment.split == "train" and self.breaker(assignment.family).state is not BreakerState.CLOSED:
                return "held back by the circuit breaker"
            return "no rollout worker has taken it" if self.workers else "no rollout worker has reported"
        worker_id = self.holder.get(trajectory_id)
        if worker_id is None:
            return "unknown"
        wait = self.workers[worker_id].waiting.get(trajectory_id)
        if wait is None:
            return f"running on {worker_id}"
        return f"waits for {wait.what}, on {worker_id}, since {wait.seconds:.0f} s"

    def _may_start(self, lane: Lane, family: str, now: float) -> bool:
        return lane == "eval" or self.breaker(family).num_allowed(now) != 0

    def _next(self, now: float) -> Assignment | None:
        for lane in LANES:
            best: deque[str] | None = None
            for (of_lane, family), queue in self._lanes.items():
                if of_lane != lane or not self._may_start(lane, family, now):
                    continue
                while queue and queue[0] not in self._queued:
                    queue.popleft()  # withdrawn while it waited
                if queue and (best is None or self._queued[queue[0]][0] < self._queued[best[0]][0]):
                    best = queue
            if best is not None:
                return self._queued.pop(best.popleft())[1]
        return None
