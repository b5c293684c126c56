"""The simulated engine: no model, no torch; generation takes the time that a hardware class's figures imply.

It stands behind the engine protocol like every other one, so that the real control plane runs over it: for load tests,
fault tests and what-if runs. The other files: `simulated_config` the figures, `simulated_timing` how long a step takes,
`simulated_answers` which tokens, `simulated_cache` which KV is kept, `simulated_faults` what goes wrong when,
`simulated_batch` which requests run.

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
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from resources.clock import Clock, ScaledClock, TimerHandle
from resources.engines.base import EngineStats, GenerateRequest, Generation, LoadReport
from resources.engines.config import EngineConfig
from resources.engines.request_checks import checked_request
from resources.engines.simulated_answers import AnswerScript
from resources.engines.simulated_batch import SimulatedBatch, SimulatedRequest
from resources.engines.simulated_cache import PrefixKV
from resources.engines.simulated_faults import FaultSchedule
from resources.engines.simulated_timing import StepTiming
from resources.failures import DeadlineExceeded, EngineFailure, RollartError
from resources.policy.tokenizer_only import read_vocabulary_size


class VersionSource(Protocol):
    """Where a simulated engine finds published versions (`resources.weights.store.WeightStore` is one)."""

    def directory(self, version: int) -> object:
        """Path of a version's directory, its files verified. Blocks; raises when the version is not published."""
        ...


Answer = tuple[asyncio.Future[Generation], Generation | Exception]


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
        self._source, self._config = weights, config
        self._simulation = config.simulation
        self._hardware = self._simulation.of_class(hardware_class)
        self._clock = clock or ScaledClock(self._simulation.time_scale)
        directory = Path(str(weights.directory(version)))
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
        self._waiters: Counter[asyncio.AbstractEventLoop] = Counter()
        """Callers that wait, by event loop."""
        self._timers: dict[asyncio.AbstractEventLoop, tuple[float, TimerHandle]] = {}
        self._arrivals: dict[int, tuple[float, float]] = {}
        """When the transfer of each fetched version began, and when its last byte is there."""

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
            self._waiters[loop] += 1
            self._advance()
            self._set_timer(loop)
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
                self._waiters[loop] -= 1
                if not self._waiters[loop]:
                    del self._waiters[loop]
                    self._cancel_timer(loop)

    async def abort(self, request_id: str) -> None:
        with self._lock:
            self._batch.abort(request_id, self._advance())
            self._advance()
            self._wake_loops()

    async def release(self, trajectory_id: str) -> None:
        with self._lock:
            self._batch.release(trajectory_id)

    async def prefetch(self, version: int) -> None:
        """Let a version's weights arrive beside the ones in use. Raises EngineFailure when it cannot be fetched."""
        if version != self.version:
            await self._fetch(version)

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
            self._wake_loops()

    async def load(self, version: int) -> LoadReport:
        """See `Engine.load`. Raises EngineFailure when not suspended, or when the version cannot be fetched; the engine
        then still holds the version that it had."""
        started_at = self._clock.now()
        self._check_alive()
        if not self.suspended:
            raise EngineFailure(f"engine {self.name}: load of version {version} while it serves; suspend it first")
        if version == self.version:
            return LoadReport(version, exposed_s=0.0, total_s=0.0, num_bytes=0)
        began_at, _ = await self._fetch(version)
        weight_bytes = self._simulation.weight_bytes
        if self._hardware.swap_bytes_per_s is not None:
            await self._clock.sleep(weight_bytes / self._hardware.swap_bytes_per_s)
        with self._lock:
            self._check_alive()
            if not self.suspended:
                raise EngineFailure(f"engine {self.name}: load of version {version} while it serves; suspend it first")
            recomputed = self._batch.switch(version)
            self._arrivals = {other: times for other, times in self._arrivals.items() if other > version}
        exposed_s = self._clock.now() - started_at
        # The part of the transfer that lay before the load was hidden behind serving.
        hidden_s = self._hidden_s(began_at, started_at)
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
            self._wake_loops()

    async def stats(self) -> EngineStats:
        """Raises EngineFailure when the engine is dead."""
        with self._lock:
            self._advance()
            self._check_alive()
            batch, counters = self._batch, self._batch.counters
            return EngineStats(
                engine=self.name,
                hardware_class=self.hardware_class,
                version=self.version,
                suspended=self.suspended,
                num_running=batch.num_running,
                num_waiting=batch.num_waiting,
                num_slots=self._config.num_slots,
                generated_tokens=counters.generated_tokens,
                prefilled_tokens=counters.prefilled_tokens,
                cached_tokens=counters.cached_tokens,
                recomputed_tokens=counters.recomputed_tokens,
                busy_s=counters.busy_s,
                prefill_s=counters.prefill_s,
                decode_s=counters.decode_s,
                extra={"num_steps": float(counters.num_steps), "time_scale": self._clock.scale},
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
        by_loop: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
        for one, answer in answers:
            future = self._futures.pop(one, None)
            if future is not None:  # else: its caller was cancelled
                by_loop.setdefault(future.get_loop(), []).append((future, answer))
        for loop, of_loop in by_loop.items():
            _on_loop(loop, _set_results, of_loop)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake this loop (the running one) when the next request ends, and not before."""
        when = None if self.failure is not None else self._batch.next_event()
        timer = self._timers.get(loop)
        if timer is not None:
            if when is not None and timer[0] <= when:
                return  # it looks again then
            self._cancel_timer(loop)
        if when is not None:
            self._timers[loop] = when, self._clock.call_at(when, lambda: self._wake(loop))

    def _cancel_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        timer = self._timers.pop(loop, None)
        if timer is not None:
            timer[1].cancel()

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._timers.pop(loop, None)
            self._advance()
            if self._waiters[loop]:
                self._set_timer(loop)

    def _wake_loops(self) -> None:
        """What ends next may have changed for every loop with callers."""
        for loop in list(self._waiters):
            _on_loop(loop, self._look_again, loop)

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._cancel_timer(loop)
        self._wake(loop)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailure(self.failure)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def _fetch(self, version: int) -> tuple[float, float]:
        """Returns when all of the version's bytes are there: (began, arrived), simulated seconds."""
        if version not in self._arrivals:
            try:
                await asyncio.to_thread(self._source.directory, version)
            except (ValueError, KeyError, OSError, RollartError) as error:
                raise EngineFailure(f"engine {self.name}: version {version} cannot be fetched: {error}") from error
        if version not in self._arrivals:
            # Transfers follow each other on one link.
            now = self._clock.now()
            begins = max([now, *(arrived for _, arrived in self._arrivals.values())])
            arrives = begins + self._simulation.weight_bytes / self._hardware.load_bytes_per_s
            self._arrivals[version] = begins, arrives
        began, arrived = self._arrivals[version]
        while (left_s := arrived - self._clock.now()) > 0:
            await self._clock.sleep(left_s)
        return began, arrived

    def _hidden_s(self, began_at: float, load_started_at: float) -> float:
        transfer_s = self._simulation.weight_bytes / self._hardware.load_bytes_per_s
        return min(transfer_s, max(0.0, load_started_at - began_at))


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


def _on_loop(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
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


def _set_results(answers: list[Answer]) -> None:
    for future, result in answers:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
