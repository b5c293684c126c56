"""The batch of a simulated engine: which requests run, and what has happened by now? A pure state machine over time.

Between two moments at which something changes (an arrival, a prefill, an end, a fault) every step is like the one
before but for the growth of the KV, so `advance` jumps there in closed form (`simulated_timing`): no work per token.

The state is that at a *boundary* between two steps. While a step runs, the boundary is its end and lies ahead: the
step can no longer be changed, and what it finishes is handed over then. Whatever arrives meanwhile waits for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from resources.engines.base import FinishReason, GenerateRequest, Generation
from resources.engines.simulated_answers import AnswerPlan, AnswerScript
from resources.engines.simulated_cache import PrefixKV
from resources.engines.simulated_faults import FaultSchedule
from resources.engines.simulated_timing import StepTiming

NOTHING = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on its way through the engine. Times are simulated seconds."""

    request: GenerateRequest
    plan: AnswerPlan
    submitted_at: float
    admitted_at: float = 0.0
    first_token_at: float | None = None
    cached_tokens: int = 0
    kv_length: int = 0
    """While it is prefilled: tokens of the history whose KV is there."""
    outdated: int = 0
    """Tokens at the beginning of the history whose KV was there under an older version."""
    num_sampled: int = 0
    """As of ``at_step``; while it decodes, one more with every step since then."""
    at_step: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens sampled before it): where the tokens of older versions end."""
    decoding: bool = False
    ended: bool = False
    released: bool = False

    def __lt__(self, other: SimulatedRequest) -> bool:
        return self.submitted_at < other.submitted_at


@dataclass(slots=True)
class BatchCounters:
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


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
        self.counters = BatchCounters()
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
        self._ends: list[tuple[int, SimulatedRequest]] = []
        """Heap of (step after which it has all its tokens, decoding request); ended ones may still be in it."""
        self._running: dict[str, SimulatedRequest] = {}
        self._step = 0
        self._num_decoding = 0
        self._kv_decoding = 0
        """KV tokens that a decode step reads."""
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
                self._stop_decoding(one)
                one.outdated = max(one.outdated, self._length(one) - 1)
                lost += self._length(one) - 1
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
        num_steps = self._steps_to_next_end()
        ends = self.boundary + self._timing.decode_steps(
            num_steps, self._num_decoding, self._kv_decoding
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
            self._reserved += self._most(one)
            self._cache.make_room(self._kv_capacity - self._reserved)
            self._prefilling.append(one)
            self.counters.cached_tokens += reuse.cached

    def _can_admit(self) -> bool:
        return (
            bool(self._waiting)
            and len(self._running) < self._num_slots
            and self._reserved + self._most(self._waiting[0]) <= self._kv_capacity
        )

    def _mixed_step(self) -> None:
        """One step: a token for every decoding request, and pieces of missing histories, first come first served."""
        budget, kv_tokens, completed = self._max_prefill, self._kv_decoding, []
        for one in self._prefilling:
            start, length = one.kv_length, self._length(one)
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
        duration = self._timing.step(num_prefilled + self._num_decoding, kv_tokens)
        self._take(1, duration * self.faults.slowdown(self.boundary), num_prefilled)
        for one in completed:
            self._prefilling.popleft()
            self._start_decoding(one)
        self._finish_ended()

    def _decode(self, until: float) -> None:
        """Steps up to the next end of a request, but none that begins after ``until``."""
        most, slowdown = self._steps_to_next_end(), self.faults.slowdown(self.boundary)
        batch, kv_tokens = self._num_decoding, self._kv_decoding
        num_steps = self._timing.decode_steps_beyond((until - self.boundary) / slowdown, most, batch, kv_tokens)
        self._take(num_steps, self._timing.decode_steps(num_steps, batch, kv_tokens) * slowdown, 0)
        self._finish_ended()

    def _take(self, num_steps: int, duration: float, num_prefilled: int) -> None:
        counters, real_s = self.counters, duration / self._time_scale
        self._step += num_steps
        self.boundary += duration
        self._kv_decoding += num_steps * self._num_decoding
        # A step computes both kinds of rows together; its time is shared out by their numbers.
        prefill_share = num_prefilled / max(1, num_prefilled + self._num_decoding)
        counters.num_steps += num_steps
        counters.generated_tokens += num_steps * self._num_decoding
        counters.prefilled_tokens += num_prefilled
        counters.busy_s += real_s
        counters.prefill_s += real_s * prefill_share
        counters.decode_s += real_s * (1.0 - prefill_share)

    def _steps_to_next_end(self) -> int:
        while self._ends[0][1].ended or not self._ends[0][1].decoding:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._step

    # -- one request -------------------------------------------------------------------------------------------------

    def _start_decoding(self, one: SimulatedRequest) -> None:
        """Its history is complete as of the step just taken, which sampled its next token as well."""
        one.num_sampled += 1
        one.at_step = self._step
        one.decoding = True
        one.outdated = 0
        if one.first_token_at is None:
            one.first_token_at = self.boundary
        self.counters.generated_tokens += 1
        self._num_decoding += 1
        self._kv_decoding += self._length(one)
        heapq.heappush(self._ends, (self._step + one.plan.num_tokens - one.num_sampled, one))

    def _stop_decoding(self, one: SimulatedRequest) -> None:
        self._kv_decoding -= self._length(one)
        self._num_decoding -= 1
        one.num_sampled = self._sampled(one)
        one.decoding = False

    def _finish_ended(self) -> None:
        while self._ends and (self._ends[0][0] <= self._step or self._ends[0][1].ended):
            _, one = heapq.heappop(self._ends)
            if one.decoding and not one.ended and self._sampled(one) >= one.plan.num_tokens:
                self._finish(one, one.plan.finish_reason, self.boundary, self._remove(one))

    def _remove(self, one: SimulatedRequest) -> np.ndarray:
        """Out of the batch; its KV is kept for the trajectory's next turn, unless nobody will have one. Returns what it
        has sampled."""
        if one.decoding:
            self._stop_decoding(one)
            in_cache = self._length(one) - 1  # the last token's KV was never needed
        else:
            self._prefilling.remove(one)
            in_cache = one.kv_length
        one.ended = True
        del self._running[one.request.request_id]
        self._reserved -= self._most(one)
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
            versions=self._versions(one, wrong=self.faults.claims_wrong_version(at)),
            finish_reason=reason,
            engine=self.engine,
            hardware_class=self.hardware_class,
            cached_tokens=one.cached_tokens,
            queue_s=(one.admitted_at - one.submitted_at) / self._time_scale,
            prefill_s=(first_token_at - one.admitted_at) / self._time_scale,
            decode_s=(at - first_token_at) / self._time_scale,
        )
        self._finished.append((at, one, generation))

    def _versions(self, one: SimulatedRequest, *, wrong: bool) -> np.ndarray:
        versions = np.full(one.num_sampled, self.version + wrong, dtype=np.int32)
        for version, until in reversed(one.spans):
            versions[:until] = version
        return versions

    def _sampled(self, one: SimulatedRequest) -> int:
        return one.num_sampled + (self._step - one.at_step if one.decoding else 0)

    def _length(self, one: SimulatedRequest) -> int:
        return len(one.request.token_ids) + self._sampled(one)

    def _most(self, one: SimulatedRequest) -> int:
        """KV tokens that it may come to need; the engine does not know how long its answer will be."""
        return min(self._context_length, len(one.request.token_ids) + one.request.sampling.max_new_tokens)
