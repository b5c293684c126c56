"""What becomes of an actor whose worker is gone? A pure state machine: losses and living workers in, decisions out.

A lost actor is built again on a free worker of its class. While there is none, others stand in for it, or the run waits
``replacement_wait_s`` and ends. The group queue is not rebuilt: what it knows of trajectories under way dies with it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from resources.hardware import Role
from resources.recovery.config import RecoveryConfig


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in the run that an actor fills, and another one after it."""

    name: str
    role: Role
    classes: tuple[str, ...]
    """Hardware classes whose workers may host it, best first."""
    stand_ins: tuple[str, ...] = ()
    """Names of the seats that can do its work while it is empty."""


@dataclass(frozen=True, slots=True)
class Build:
    """Build the seat's actor on this worker."""

    seat: Seat
    worker: str


@dataclass(frozen=True, slots=True)
class GoOnWithout:
    """Nobody can host it now; others stand in. It is built as soon as a worker appears."""

    seat: Seat
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run cannot go on."""

    reason: str


Decision = Build | GoOnWithout | GiveUp


@dataclass(slots=True)
class _Gap:
    since: float
    reason: str
    accepted: bool = False
    """Others stand in for it."""


class RecoveryPlan:
    """``now`` is seconds of any monotonic clock."""

    def __init__(self, seats: Mapping[Seat, str], config: RecoveryConfig) -> None:
        """
        Args:
            seats: every seat, and the worker that hosts its actor.
        """
        self._config = config
        self._seats = {seat.name: seat for seat in seats}
        self._hosts = {seat.name: worker for seat, worker in seats.items()}
        """Worker of every seat that is filled, or being filled."""
        self._building: set[str] = set()
        self._gaps: dict[str, _Gap] = {}
        self._recent: dict[Role, deque[float]] = {}
        self.restarts: Counter[Role] = Counter()
        """Actors lost and rebuilt, or being rebuilt, by role."""
        self.failure: str | None = None
        """Why the run cannot go on."""

    @property
    def has_gaps(self) -> bool:
        """Whether a seat waits for a worker."""
        return bool(self._gaps)

    def lost(self, name: str, reason: str, now: float) -> list[Decision]:
        """The seat's actor is gone."""
        seat = self._seats[name]
        self._hosts.pop(name, None)
        self._building.discard(name)
        if self.failure is not None or name in self._gaps:
            return []
        if seat.role == "control":
            return self._give_up(
                f"{reason}. The group queue held the trajectories under way and cannot be rebuilt; "
                "resume the run behind its last recorded iteration (--resume)"
            )
        recent = self._recent.setdefault(seat.role, deque())
        while recent and now - recent[0] > self._config.restart_window_s:
            recent.popleft()
        if len(recent) >= self._config.max_restarts:
            return self._give_up(
                f"{reason}. Actors of role {seat.role} were rebuilt {len(recent)} times within "
                f"{self._config.restart_window_s:g} s, which is all that recovery.max_restarts "
                f"({self._config.max_restarts}) allows; look for the cause in the workers' log, then resume the run "
                "(--resume)"
            )
        recent.append(now)
        self.restarts[seat.role] += 1
        self._gaps[name] = _Gap(now, reason)
        return []

    def built(self, name: str) -> None:
        """The actor lives on the worker that `Build` named."""
        self._building.discard(name)

    def look(self, workers: Mapping[str, Sequence[str]], now: float) -> list[Decision]:
        """Fill what can be filled with the workers there are (addresses by hardware class)."""
        decisions: list[Decision] = []
        for name, gap in list(self._gaps.items()):
            if self.failure is not None:
                break
            seat = self._seats[name]
            worker = self._free(seat, workers)
            if worker is not None:
                del self._gaps[name]
                self._hosts[name] = worker
                self._building.add(name)
                decisions.append(Build(seat, worker))
            elif now - gap.since >= self._config.replacement_wait_s and not gap.accepted:
                decisions += self._miss(seat, gap)
        return decisions

    def _free(self, seat: Seat, workers: Mapping[str, Sequence[str]]) -> str | None:
        taken = {worker for name, worker in self._hosts.items() if self._seats[name].role == seat.role}
        return next((each for name in seat.classes for each in workers.get(name, ()) if each not in taken), None)

    def _miss(self, seat: Seat, gap: _Gap) -> list[Decision]:
        waited = (
            f"{gap.reason}. No worker of class {_either(seat.classes)} came to host {seat.name} within "
            f"{self._config.replacement_wait_s:g} s (recovery.replacement_wait_s)"
        )
        standing_in = [name for name in seat.stand_ins if name in self._hosts and name not in self._building]
        if not standing_in:
            return self._give_up(f"{waited}, and nothing stands in for it; start such a worker, and resume (--resume)")
        gap.accepted = True
        return [GoOnWithout(seat, f"{waited}; {', '.join(standing_in)} stand in for it until one comes")]

    def _give_up(self, reason: str) -> list[Decision]:
        self.failure = reason
        return [GiveUp(reason)]


def _either(names: Iterable[str]) -> str:
    return " or ".join(repr(name) for name in names)
