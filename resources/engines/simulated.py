"""The simulated engine: no model, no torch; generation takes the time that a hardware class's figures imply.

It stands behind the engine protocol like every other one, so that the real control plane runs over it: for load tests,
fault tests and what-if runs. The other files: `simulated_config` the figures, `simulated_timing` how long a step takes,
`simulated_answers` which tokens, `simulated_cache` which KV is kept, `simulated_faults` what goes wrong when,
`simulated_batch` which requests run, `simulated_requests` how far each is, `simulated_transfer` when weights arrive,
`simulated_wakeups` who looks when.

The simulation is computed when somebody looks: each call first advances the batch to the clock's time, under a lock,
and one timer on each event loop with waiting callers wakes it when the next request ends. There is no thread, and no
timer per request. What is reported (queue, prefill and decode times, loads) is in seconds of the machine, like
everything else that a run measures; multiplied with ``time_scale`` it is simulated seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

from resources.clock import Clock, ScaledClock
from resources.engines.answers import AnswerBox
from resources.engines.base import EngineStats, GenerateRequest, Generation, LoadReport
from resources.engines.config import EngineConfig
from resources.engines.request_checks import checked_request
from resources.engines.simulated_answers import AnswerScript
from resources.engines.simulated_batch import SimulatedBatch
from resources.engines.simulated_cache import PrefixKV
from resources.engines.simulated_faults import FaultSchedule
from resources.engines.simulated_requests import SimulatedRequest
from resources.engines.simulated_timing import StepTiming
from resources.engines.simulated_transfer import VersionSource, WeightLink
from resources.engines.simulated_wakeups import WakeUps
from resources.failures import DeadlineExceeded, EngineFailure
from resources.policy.tokenizer_only import read_vocabulary_size


class SimulatedEngine:
    """Implements `resources.engines.base.Engine`. The time in which the first weights load is not simulated."""

    def __init__(
        self,
        name: str,
        hardware_class: str,
        weights: VersionSource,
        version: int,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Raises ValueError for figures or sizes that do not go together, naming the setting."""
        self.name = name
        self.hardware_class = hardware_class
        self.failure: str | None = None
        """Why no request can be answered any more; None while the engine lives."""
        self._config = config
        self._simulation = config.simulation
        self._hardware = self._simulation.of_class(hardware_class)
        self._clock = clock or ScaledClock(self._simulation.time_scale)
        directory = Path(str(weights.policy_directory(version)))
        context_length = _context_length(config, directory)
        self._vocab_size = read_vocabulary_size(directory)
        capacity = self._simulation.kv_capacity_tokens(hardware_class)
        if capacity < context_length:
            raise ValueError(
                f"engine.simulated.hardware.{hardware_class}.memory_bytes leaves room for the KV of {capacity} tokens, "
                f"and one history may have {context_length}; raise it, or lower engine.context_length"
            )
        self._batch = SimulatedBatch(
            engine=name,
            hardware_class=hardware_class,
            version=version,
            timing=StepTiming.of(self._simulation, hardware_class),
            script=AnswerScript(self._simulation.answers, self._vocab_size),
            cache=PrefixKV(config.prefix_cache),
            faults=FaultSchedule(self._simulation.faults, name, hardware_class, self._clock.now()),
            num_slots=config.num_slots,
            context_length=context_length,
            kv_capacity_tokens=capacity,
            max_prefill_tokens=config.max_prefill_tokens_per_step,
            time_scale=self._clock.scale,
        )
        self._lock = threading.Lock()
        self._futures: dict[SimulatedRequest, asyncio.Future[Generation]] = {}
        self._answers = AnswerBox()
        self._wakeups = WakeUps(self._clock, self._look)
        transfer_s = self._simulation.weight_bytes / self._hardware.load_bytes_per_s
        self._link = WeightLink(name, weights, self._clock, transfer_s)

    @property
    def version(self) -> int:
        """Version under which the next token is sampled."""
        return self._batch.version

    @property
    def suspended(self) -> bool:
        return self._batch.suspended

    @property
    def num_free(self) -> int:
        """Slots without a running request, less the requests that wait for one; 0 or less when the engine is full."""
        return self._config.num_slots - self._batch.num_running - self._batch.num_waiting

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`. Cancelling the coroutine aborts the request."""
        request = checked_request(request, self._vocab_size)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        with self._lock:
            now = self._advance()
            self._check_alive()
            if self._batch.holds(request.request_id):
                raise EngineFailure(f"engine {self.name}: request {request.request_id} is running already")
            self._futures[self._batch.submit(request, now)] = future
            self._wakeups.enter(loop)
            self._advance()
            self._wakeups.arm(loop, self._next_event())
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                one = self._batch.abort(request.request_id, self._advance())
                if one is not None:
                    self._futures.pop(one, None)
            raise
        finally:
            with self._lock:
                self._wakeups.leave(loop)

    async def abort(self, request_id: str) -> None:
        with self._lock:
            self._batch.abort(request_id, self._advance())
            self._advance()
            self._wakeups.look_everywhere()

    async def release(self, trajectory_id: str) -> None:
        with self._lock:
            self._batch.release(trajectory_id)

    async def prefetch(self, version: int) -> None:
        """Let a version's weights arrive beside the ones in use. Raises EngineFailure when it cannot be fetched."""
        if version != self.version:
            await self._link.fetch(version)

    async def suspend(self) -> None:
        """See `Engine`. Raises DeadlineExceeded when the step that runs does not end in time."""
        with self._lock:
            now = self._advance()
            self._check_alive()
            self._batch.suspended = True
            left_s = max(self._batch.boundary, self._batch.faults.hangs_until(now)) - now
        limit_s = self._config.control_timeout_s
        if left_s / self._clock.scale > limit_s:
            await self._clock.sleep(limit_s * self._clock.scale)
            raise DeadlineExceeded(f"engine {self.name}: its step loop did not take up suspend within {limit_s:g} s")
        if left_s > 0:
            await self._clock.sleep(left_s)
        with self._lock:
            self._advance()
            self._wakeups.look_everywhere()

    async def load(self, version: int) -> LoadReport:
        """See `Engine.load`. Raises EngineFailure when not suspended, or when the version cannot be fetched; the engine
        then still holds the version that it had."""
        started_at = self._clock.now()
        self._check_alive()
        if not self.suspended:
            raise EngineFailure(f"engine {self.name}: load of version {version} while it serves; suspend it first")
        if version == self.version:
            return LoadReport(version, exposed_s=0.0, total_s=0.0, num_bytes=0)
        began_at = await self._link.fetch(version)
        weight_bytes = self._simulation.weight_bytes
        if self._hardware.swap_bytes_per_s is not None:
            await self._clock.sleep(weight_bytes / self._hardware.swap_bytes_per_s)
        with self._lock:
            self._check_alive()
            if not self.suspended:
                raise EngineFailure(f"engine {self.name}: load of version {version} while it serves; suspend it first")
            recomputed = self._batch.switch(version)
            self._link.loaded(version)
        exposed_s = self._clock.now() - started_at
        hidden_s = self._link.hidden_s(began_at, started_at)
        return LoadReport(
            version=version,
            exposed_s=exposed_s / self._clock.scale,
            total_s=(exposed_s + hidden_s) / self._clock.scale,
            num_bytes=int(weight_bytes),
            recomputed_tokens=recomputed,
        )

    async def resume(self) -> None:
        with self._lock:
            self._check_alive()
            self._batch.resume(self._clock.now())
            self._advance()
            self._wakeups.look_everywhere()

    async def stats(self) -> EngineStats:
        """Raises EngineFailure when the engine is dead."""
        with self._lock:
            self._advance()
            self._check_alive()
            return self._batch.counters.stats(
                engine=self.name,
                hardware_class=self.hardware_class,
                version=self.version,
                suspended=self.suspended,
                num_running=self._batch.num_running,
                num_waiting=self._batch.num_waiting,
                num_slots=self._config.num_slots,
                time_scale=self._clock.scale,
            )

    async def close(self) -> None:
        with self._lock:
            if self.failure is None:
                self._fail_all(f"engine {self.name} was closed")

    # -- inside; callers hold the lock -------------------------------------------------------------------------------

    def _advance(self) -> float:
        """Bring the batch to the present and hand over what has ended. Returns the time."""
        now = self._clock.now()
        if self.failure is not None:
            return now
        try:
            self._batch.advance(now)
            self._settle([(one, generation) for _, one, generation in self._batch.take_finished(now)])
            if self._batch.crashed_at is not None:
                self._crash(now)
        except Exception as error:  # noqa: BLE001 - whatever it was, every caller is to be answered with it
            self._fail_all(f"engine {self.name} failed: {type(error).__name__}: {error}")
        return now

    def _crash(self, now: float) -> None:
        """The injected fault: what runs is handed back with what it has sampled, everything else fails."""
        reason = f"engine {self.name}: its step loop crashed (injected fault)"
        finished, waiting = self._batch.take_all(now)
        self._settle([(one, dataclasses.replace(generation, error=reason)) for _, one, generation in finished])
        self.failure = reason
        self._settle([(one, EngineFailure(reason)) for one in waiting])

    def _fail_all(self, reason: str) -> None:
        self.failure = reason
        self._settle([(one, EngineFailure(reason)) for one in list(self._futures)])

    def _settle(self, answers: list[tuple[SimulatedRequest, Generation | Exception]]) -> None:
        for one, answer in answers:
            future = self._futures.pop(one, None)
            if future is not None:  # else: its caller was cancelled
                self._answers.put(future, answer)
        self._answers.send()

    def _next_event(self) -> float | None:
        return None if self.failure is not None else self._batch.next_event()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._wakeups.disarm(loop)
            self._advance()
            if self._wakeups.waits(loop):
                self._wakeups.arm(loop, self._next_event())

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailure(self.failure)


def _context_length(config: EngineConfig, directory: Path) -> int:
    if config.context_length is not None:
        return config.context_length
    path = directory / "config.json"
    length: Any = json.loads(path.read_bytes()).get("max_position_embeddings") if path.is_file() else None
    if not isinstance(length, int):
        raise ValueError(
            f"engine.context_length is not given, and {str(path)!r} names no max_position_embeddings; set it"
        )
    return length
