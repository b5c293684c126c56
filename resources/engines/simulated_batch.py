"""The batch of a simulated engine: which requests run, and what has happened by now? A pure state machine over time.

Between two moments at which something changes (an arrival, a prefill, an end, a fault) every step is like the one
before but for the growth of the KV, so `advance` jumps there in closed form (`simulated_timing`): no work per token.

The state is that at a *boundary* between two steps. While a step runs, the boundary is its end and lies ahead: the
step can no longer be changed, and what it finishes is handed over then. Whatever arrives meanwhile waits for it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from resources.engines.base import FinishReason, GenerateRequest, Generation
from resources.engines.counters import StepCounters
from resources.engines.simulated_answers import AnswerPlan, AnswerScript
from resources.engines.simulated_cache import PrefixKV
from resources.engines.simulated_faults import FaultSchedule
from resources.engines.simulated_requests import DecodingRequests, SimulatedRequest
from resources.engines.simulated_timing import StepTiming

NOTHING = np.empty(0, dtype=np.int32)


Finished = tuple[float, SimulatedRequest, Generation]


class SimulatedBatch:
    """Requests in slots, and the steps that move them on. One thread at a time."""

    def __init__(
        self,
        *,
        engine: str,
        hardware_class: str,
        version: int,
        timing: StepTiming,
        script: AnswerScript,
        cache: PrefixKV,
        faults: FaultSchedule,
        num_slots: int,
        context_length: int,
        kv_capacity_tokens: int,
        max_prefill_tokens: int,
        time_scale: float = 1.0,
    ) -> None:
        self.engine, self.hardware_class, self.version = engine, hardware_class, version
        self.suspended = False
        self.counters = StepCounters()
        self.faults = faults
        self.boundary = 0.0
        """End of the last step that was taken, or is being taken."""
        self.crashed_at: float | None = None
        self._timing, self._script, self._cache = timing, script, cache
        self._num_slots, self._context_length = num_slots, context_length
        self._kv_capacity, self._max_prefill = kv_capacity_tokens, max_prefill_tokens
        self._time_scale = time_scale
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: deque[SimulatedRequest] = deque()
        self._running: dict[str, SimulatedRequest] = {}
        self._decoding = DecodingRequests()
        self._reserved = 0
        """KV tokens that the running requests may come to need."""
        self._finished: list[Finished] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def holds(self, request_id: str) -> bool:
        """Whether a request of this id runs."""
        return request_id in self._running

    # -- what callers do ---------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, now: float) -> SimulatedRequest:
        """Take up a request; an empty answer is finished at once."""
        self.faults.request_arrived(now)
        if len(request.token_ids) >= self._context_length or request.sampling.max_new_tokens == 0:
            full = len(request.token_ids) >= self._context_length
            one = SimulatedRequest(request, AnswerPlan(0, "context" if full else "length"), now, admitted_at=now)
            self._finish(one, one.plan.finish_reason, now)
            return one
        one = SimulatedRequest(request, self._script.plan(request, self._context_length), now)
        if not self._running and not self._waiting:
            self.boundary = max(self.boundary, now)
        self._waiting.append(one)
        return one

    def abort(self, request_id: str, now: float) -> SimulatedRequest | None:
        """End a request at the boundary; it is finished with what it has sampled. None: it does not run or wait."""
        one = self._running.get(request_id)
        if one is not None:
            self._finish(one, "abort", max(now, self.boundary), self._remove(one))
            return one
        one = next((one for one in self._waiting if one.request.request_id == request_id), None)
        if one is not None:
            self._waiting.remove(one)
            one.admitted_at = now
            self._finish(one, "abort", now)
        return one

    def release(self, trajectory_id: str) -> None:
        """Drop the KV kept for a trajectory, or do not keep it once its request ends."""
        self._cache.release(trajectory_id)
        for one in self._running.values():
            if one.request.trajectory_id == trajectory_id:
                one.released = True

    def resume(self, now: float) -> None:
        self.suspended = False
        self.boundary = max(self.boundary, now)

    def switch(self, version: int) -> int:
        """Go on under another version: every KV is invalid. Returns the tokens of histories in use that lost theirs."""
        lost = self._cache.outdate()
        for one in self._running.values():
            if one.decoding:
                self._decoding.stop(one)
                in_cache = self._decoding.length(one) - 1
                one.outdated = max(one.outdated, in_cache)
                lost += in_cache
                self._prefilling.append(one)
            else:
                lost += one.kv_length
                one.outdated = max(one.outdated, one.kv_length)
            one.kv_length = 0
            one.spans.append((self.version, one.num_sampled))
        self.version = version
        return lost

    def take_finished(self, now: float) -> list[Finished]:
        """What has been finished by now; each is handed over once."""
        ready = [finished for finished in self._finished if finished[0] <= now]
        if ready:
            self._finished = [finished for finished in self._finished if finished[0] > now]
        return ready

    def take_all(self, now: float) -> tuple[list[Finished], list[SimulatedRequest]]:
        """The engine ends: running requests with what they have sampled, as aborted; waiting ones as they are."""
        for one in list(self._running.values()):
            self._finish(one, "abort", now, self._remove(one))
        finished, self._finished = self._finished, []
        waiting, self._waiting = list(self._waiting), deque()
        return finished, waiting

    # -- time --------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Take every step that has begun by now."""
        while self.boundary <= now and not self.suspended and self.crashed_at is None:
            self.crashed_at = self.faults.crashed_at(self.boundary)
            self._admit()
            if self.crashed_at is not None or not self._running:
                return
            self.boundary = self.faults.hangs_until(self.boundary)
            if self.boundary > now:
                return
            if self._prefilling:
                self._mixed_step()
            else:
                self._decode(min(now, self.faults.next_change(self.boundary)))

    def next_event(self) -> float | None:
        """When there is something to hand over or to take up, unless something arrives before; None: never."""
        if self._finished:
            return min(finished[0] for finished in self._finished)
        if self.suspended or self.crashed_at is not None or not (self._running or self._waiting):
            return None
        begins = self.faults.hangs_until(self.boundary)
        if self.faults.crashed_at(self.boundary) is not None:
            return self.boundary
        if begins > self.boundary or self._prefilling or self._can_admit():
            return begins if begins < float("inf") else None
        num_steps = self._decoding.steps_to_next_end()
        ends = self.boundary + self._timing.decode_steps(
            num_steps, len(self._decoding), self._decoding.kv_tokens
        ) * self.faults.slowdown(self.boundary)
        return min(ends, self.faults.next_change(self.boundary))

    def _admit(self) -> None:
        while self._can_admit():
            one = self._waiting.popleft()
            request = one.request
            reuse = self._cache.take(request.trajectory_id, request.token_ids)
            one.admitted_at = max(self.boundary, one.submitted_at)
            one.cached_tokens = one.kv_length = reuse.cached
            one.outdated = reuse.outdated
            self._running[request.request_id] = one
            self._reserved += one.most_tokens(self._context_length)
            self._cache.make_room(self._kv_capacity - self._reserved)
            self._prefilling.append(one)
            self.counters.cached_tokens += reuse.cached

    def _can_admit(self) -> bool:
        return (
            bool(self._waiting)
            and len(self._running) < self._num_slots
            and self._reserved + self._waiting[0].most_tokens(self._context_length) <= self._kv_capacity
        )

    def _mixed_step(self) -> None:
        """One step: a token for every decoding request, and pieces of missing histories, first come first served."""
        budget, kv_tokens, completed = self._max_prefill, self._decoding.kv_tokens, []
        for one in self._prefilling:
            start, length = one.kv_length, self._decoding.length(one)
            end = min(length, start + budget)
            self.counters.recomputed_tokens += max(0, min(one.outdated, end) - start)
            one.kv_length = end
            budget -= end - start
            kv_tokens += end
            if end == length:
                completed.append(one)
            if not budget:
                break
        num_prefilled = self._max_prefill - budget
        duration = self._timing.step(num_prefilled + len(self._decoding), kv_tokens)
        self._take(1, duration * self.faults.slowdown(self.boundary), num_prefilled)
        for one in completed:
            self._prefilling.popleft()
            self._start_decoding(one)
        self._finish_ended()

    def _decode(self, until: float) -> None:
        """Steps up to the next end of a request, but none that begins after ``until``."""
        most, slowdown = self._decoding.steps_to_next_end(), self.faults.slowdown(self.boundary)
        batch, kv_tokens = len(self._decoding), self._decoding.kv_tokens
        num_steps = self._timing.decode_steps_beyond((until - self.boundary) / slowdown, most, batch, kv_tokens)
        self._take(num_steps, self._timing.decode_steps(num_steps, batch, kv_tokens) * slowdown, 0)
        self._finish_ended()

    def _take(self, num_steps: int, duration: float, num_prefilled: int) -> None:
        num_decoding = len(self._decoding)
        self._decoding.take(num_steps)
        self.boundary += duration
        self.counters.count(
            duration / self._time_scale,
            num_decoded=num_decoding,
            num_prefilled=num_prefilled,
            num_sampled=num_steps * num_decoding,
            num_steps=num_steps,
        )

    # -- one request -------------------------------------------------------------------------------------------------

    def _start_decoding(self, one: SimulatedRequest) -> None:
        self._decoding.start(one)
        if one.first_token_at is None:
            one.first_token_at = self.boundary
        self.counters.generated_tokens += 1

    def _finish_ended(self) -> None:
        for one in self._decoding.take_ended():
            self._finish(one, one.plan.finish_reason, self.boundary, self._remove(one))

    def _remove(self, one: SimulatedRequest) -> np.ndarray:
        """Out of the batch; its KV is kept for the trajectory's next turn, unless nobody will have one. Returns what it
        has sampled."""
        if one.decoding:
            self._decoding.stop(one)
            in_cache = self._decoding.length(one) - 1  # the last token's KV was never needed
        else:
            self._prefilling.remove(one)
            in_cache = one.kv_length
        one.ended = True
        del self._running[one.request.request_id]
        self._reserved -= one.most_tokens(self._context_length)
        history, token_ids = one.request.token_ids, self._script.tokens(one.request, one.plan, one.num_sampled)
        if in_cache > 0 and not one.released:
            sampled = token_ids[: max(0, in_cache - len(history))]
            self._cache.keep(one.request.trajectory_id, history[:in_cache], sampled)
        return token_ids

    def _finish(self, one: SimulatedRequest, reason: FinishReason, at: float, token_ids: np.ndarray = NOTHING) -> None:
        one.ended = True
        first_token_at = at if one.first_token_at is None else one.first_token_at
        generation = Generation(
            request_id=one.request.request_id,
            trajectory_id=one.request.trajectory_id,
            token_ids=token_ids,
            logprobs=np.full(one.num_sampled, self._script.logprob, dtype=np.float32),
            versions=one.versions(self.version + self.faults.claims_wrong_version(at)),
            finish_reason=reason,
            engine=self.engine,
            hardware_class=self.hardware_class,
            cached_tokens=one.cached_tokens,
            queue_s=(one.admitted_at - one.submitted_at) / self._time_scale,
            prefill_s=(first_token_at - one.admitted_at) / self._time_scale,
            decode_s=(at - first_token_at) / self._time_scale,
        )
        self._finished.append((at, one, generation))
