"""One step of the local engine: compute what histories are missing, sample one token for each that is complete.

A running request whose KV lacks only its last token is a *single*; one that lacks more (a prompt, an observation, or
everything after a load) is computed in *pieces* within the token budget, first come first served. Both share a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from resources.engines.base import FinishReason, GenerateRequest, Generation
from resources.engines.counters import StepCounters
from resources.engines.local_forward import LocalForward, Piece
from resources.engines.local_sampling import sample_tokens
from resources.engines.local_slots import SlotTable
from resources.engines.local_weights import FusedWeights
from resources.engines.noise import uniform_noise


@dataclass(slots=True)
class Ticket:
    """A request on its way through the engine."""

    request: GenerateRequest
    answer: Callable[[Generation | Exception], None]
    """Called once, from the step thread."""
    submitted_at: float
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    cached_tokens: int = 0


@dataclass(slots=True)
class Stepper:
    """Requests in slots, and the step that moves them on. Belongs to one thread."""

    forward: LocalForward
    weights: FusedWeights
    table: SlotTable
    max_prefill_tokens: int
    engine: str
    hardware_class: str
    clock: Callable[[], float] = time.perf_counter
    sample: Callable[..., tuple[np.ndarray, np.ndarray]] = sample_tokens
    """As `sample_tokens`."""
    tickets: dict[int, Ticket] = field(default_factory=dict)
    """Running requests by slot."""
    counters: StepCounters = field(default_factory=StepCounters)

    def admit(self, ticket: Ticket) -> bool:
        """Give the request a slot; False when it has to wait."""
        placement = self.table.find_place(ticket.request)
        if placement is None:
            return False
        if placement.donor is not None:
            self.forward.copy_prefix(placement.donor, placement.slot, placement.reused, placement.shared)
        self.table.occupy(placement, ticket.request)
        ticket.admitted_at = self.clock()
        ticket.cached_tokens = placement.shared
        self.counters.cached_tokens += placement.shared
        self.tickets[placement.slot] = ticket
        return True

    def switch(self, weights: FusedWeights) -> int:
        """Go on under other weights. Returns the tokens of histories in use whose KV became invalid."""
        self.weights = weights
        return self.table.outdate()

    def step(self) -> list[tuple[Ticket, Generation]]:
        """One pass; returns the requests that it finished."""
        table = self.table
        started_at = self.clock()
        singles, pieces = self._plan()
        kv_length = table.kv_length
        positions = kv_length[singles]
        token_ids = np.concatenate(
            [table.history[singles, positions], *(table.history[p.slot, p.start : p.end] for p in pieces)]
        ).astype(np.int64)
        logits = self.forward.logits(self.weights, token_ids, singles, positions, pieces)
        self._count_recomputed(singles, positions, pieces)
        kv_length[singles] += 1
        for piece in pieces:
            kv_length[piece.slot] = piece.end
        completed = [piece.slot for piece in pieces if piece.completes]
        sampled = np.concatenate([singles, np.array(completed, dtype=np.int64)]) if completed else singles
        finished = self._sample(logits, sampled) if len(sampled) else []
        self.counters.count(
            self.clock() - started_at,
            num_decoded=len(singles),
            num_prefilled=len(token_ids) - len(singles),
            num_sampled=len(sampled),
        )
        return finished

    def unstarted(self, ticket: Ticket, reason: FinishReason) -> Generation:
        """The answer to a request that never got as far as a token."""
        return Generation(
            request_id=ticket.request.request_id,
            trajectory_id=ticket.request.trajectory_id,
            token_ids=np.empty(0, dtype=np.int32),
            logprobs=np.empty(0, dtype=np.float32),
            versions=np.empty(0, dtype=np.int32),
            finish_reason=reason,
            engine=self.engine,
            hardware_class=self.hardware_class,
            queue_s=self.clock() - ticket.submitted_at,
        )

    def finish(self, slot: int, reason: FinishReason) -> tuple[Ticket, Generation]:
        """End the request in a slot and collect what it sampled."""
        table, ticket = self.table, self.tickets.pop(slot)
        sampled = slice(int(table.prompt_length[slot]), int(table.length[slot]))
        now = self.clock()
        first_token_at = ticket.first_token_at or now
        generation = Generation(
            request_id=ticket.request.request_id,
            trajectory_id=ticket.request.trajectory_id,
            token_ids=table.history[slot, sampled].copy(),
            logprobs=table.logprobs[slot, sampled].copy(),
            versions=table.versions[slot, sampled].copy(),
            finish_reason=reason,
            engine=self.engine,
            hardware_class=self.hardware_class,
            cached_tokens=ticket.cached_tokens,
            queue_s=ticket.admitted_at - ticket.submitted_at,
            prefill_s=first_token_at - ticket.admitted_at,
            decode_s=now - first_token_at,
        )
        table.vacate(slot)
        return ticket, generation

    def _plan(self) -> tuple[np.ndarray, list[Piece]]:
        table = self.table
        active = np.flatnonzero(table.active)
        missing = table.length[active] - table.kv_length[active]
        assert (missing >= 1).all(), (active, missing)
        singles, longer = active[missing == 1], active[missing > 1]
        budget = self.max_prefill_tokens
        pieces = []
        for slot in longer[np.argsort(table.arrival[longer])].tolist():
            start, length = int(table.kv_length[slot]), int(table.length[slot])
            end = min(length, start + budget)
            pieces.append(Piece(slot, start, end, completes=end == length))
            budget -= end - start
            if not budget:
                break
        return singles, pieces

    def _sample(self, logits, slots: np.ndarray) -> list[tuple[Ticket, Generation]]:
        table = self.table
        positions = table.length[slots]
        noise = uniform_noise(table.seed[slots], positions.astype(np.uint64))
        token_ids, logprobs = self.sample(logits, table.temperature[slots], noise, table.greedy[slots])
        table.history[slots, positions] = token_ids
        table.logprobs[slots, positions] = logprobs
        table.versions[slots, positions] = self.weights.version
        lengths = positions + 1
        table.length[slots] = lengths
        stopped = (table.stops[slots] == token_ids[:, None]).any(axis=1)
        ended = stopped | (lengths >= table.limit[slots])
        first = positions == table.prompt_length[slots]
        if first.any():
            now = self.clock()
            for slot in slots[first].tolist():
                self.tickets[slot].first_token_at = now
        finished = []
        for slot, by_stop in zip(slots[ended].tolist(), stopped[ended].tolist(), strict=True):
            wanted = self.tickets[slot].request.sampling.max_new_tokens
            full = int(table.length[slot] - table.prompt_length[slot]) < wanted
            finished.append(self.finish(slot, "stop" if by_stop else "context" if full else "length"))
        return finished

    def _count_recomputed(self, singles: np.ndarray, positions: np.ndarray, pieces: list[Piece]) -> None:
        outdated = self.table.outdated
        recomputed = int((positions < outdated[singles]).sum())
        for piece in pieces:
            recomputed += max(0, min(int(outdated[piece.slot]), piece.end) - piece.start)
        self.counters.recomputed_tokens += recomputed
