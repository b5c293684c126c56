"""Which faults are active on a simulated engine, from when until when? Pure: time is passed in."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from resources.engines.simulated_config import Fault


@dataclass(slots=True)
class _Armed:
    fault: Fault
    draws: random.Random
    start: float = math.inf
    end: float = math.inf


class FaultSchedule:
    """The faults that concern one engine. Triggers of time are known from the start, the others come with requests."""

    def __init__(self, faults: Sequence[Fault], engine: str, hardware_class: str, now: float) -> None:
        self._armed = [
            _Armed(fault, random.Random(f"{fault.seed}/{index}/{engine}"))
            for index, fault in enumerate(faults)
            if fault.engine in (None, engine) and fault.hardware_class in (None, hardware_class)
        ]
        self._num_requests = 0
        for armed in self._armed:
            if armed.fault.after_s is not None:
                self._trigger(armed, now + armed.fault.after_s)

    def request_arrived(self, now: float) -> None:
        self._num_requests += 1
        for armed in self._armed:
            fault = armed.fault
            if fault.after_requests == self._num_requests or (
                fault.probability is not None
                and not armed.start <= now < armed.end
                and armed.draws.random() < fault.probability
            ):
                self._trigger(armed, now)

    def slowdown(self, now: float) -> float:
        """Factor on the time of a step that starts now."""
        return math.prod(armed.fault.factor or 1.0 for armed in self._active("slow", now))

    def hangs_until(self, now: float) -> float:
        """When steps end again: now, unless the engine hangs."""
        return max((armed.end for armed in self._active("hang", now)), default=now)

    def crashed_at(self, now: float) -> float | None:
        """When the step loop died; None while it lives."""
        return min((armed.start for armed in self._active("crash", now)), default=None)

    def claims_wrong_version(self, now: float) -> bool:
        return any(True for _ in self._active("wrong_version", now))

    def next_change(self, now: float) -> float:
        """The next moment at which a fault known by now begins or ends; infinite when there is none."""
        moments = [moment for armed in self._armed for moment in (armed.start, armed.end) if moment > now]
        return min(moments, default=math.inf)

    def _active(self, kind: str, now: float):
        return (armed for armed in self._armed if armed.fault.kind == kind and armed.start <= now < armed.end)

    def _trigger(self, armed: _Armed, now: float) -> None:
        armed.start = now
        armed.end = math.inf if armed.fault.duration_s is None else now + armed.fault.duration_s
